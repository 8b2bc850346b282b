"""The files of an export below a prefix, with their versions."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from fluxon_gop.errors import InvalidRequestError, SourceError, SourceNotFoundError, SourcePermissionError
from fluxon_gop.fluxonfs.beneath import open_beneath
from fluxon_gop.fluxonfs.export import FluxonFsExport
from fluxon_gop.fluxonfs.file_system import FileSystem
from fluxon_gop.fluxonfs.users import Identity
from fluxon_gop.model import Signature
from fluxon_gop.sources.listing import can_be_listed, list_files


def files_for(
    files: FileSystem, export: FluxonFsExport, prefix: str, identity: Identity | None
) -> Iterator[tuple[str, Signature | None]]:
    """Yield what of ``files_below`` this identity may read.

    Raises:
        SourcePermissionError: it may read nothing of the export.
    """
    if not callable(export.readers):
        # The same for every file.
        export.check_access(identity, prefix, files.users)
        yield from files_below(export, prefix)
        return
    for relpath, signature in files_below(export, prefix):
        with suppress(SourcePermissionError):
            files.check_access(export.name, relpath, identity)
            yield relpath, signature


def files_below(export: FluxonFsExport, prefix: str) -> Iterator[tuple[str, Signature | None]]:
    """Yield relpath and version of each regular file below a folder of an export; links are not followed.

    ``prefix``: a folder's relpath that has passed ``check_relpath``, or "" for the whole export.

    Raises:
        SourceNotFoundError: there is no such folder.
        SourceError: it cannot be listed.
        InvalidRequestError: the root is of a kind that lists nothing.
    """
    if export.is_local:
        yield from _beneath(export, prefix)
        return
    root = export.root.rstrip("/") + "/"
    if not can_be_listed(root):
        text = f"export {export.name!r}: its root is a web server's, which lists nothing"
        raise InvalidRequestError(text)
    for listed in list_files(f"{root}{prefix}/" if prefix else root, export.storage_options):
        yield listed.uri.removeprefix(root), listed.signature


def _beneath(export: FluxonFsExport, prefix: str) -> Iterator[tuple[str, Signature]]:
    shown = f"{export.name}/{prefix}"
    try:
        root = os.open(export.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        text = f"export {export.name!r}: its root cannot be opened: {error.strerror}"
        raise SourceError(text, source=shown) from None
    try:
        here = (
            open_beneath(root, prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if prefix
            else os.dup(root)
        )
    except PermissionError:
        text = f"export {export.name!r}, {prefix!r}: may not be listed"
        raise SourcePermissionError(text, source=shown) from None
    except OSError as error:
        text = f"export {export.name!r}, {prefix!r}: no such folder ({error.strerror})"
        raise SourceNotFoundError(text, source=shown) from None
    finally:
        os.close(root)
    try:
        for folder, folders, names, descriptor in os.fwalk(".", dir_fd=here, follow_symlinks=False):
            folders.sort()
            for name in sorted(names):
                try:
                    found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(found.st_mode):
                    parts = [part for part in (prefix, folder.removeprefix(".").strip("/"), name) if part]
                    yield "/".join(parts), Signature(found.st_size, None, found.st_mtime_ns)
    finally:
        os.close(here)
