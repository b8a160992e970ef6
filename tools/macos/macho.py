"""Reads Mach-O files, the format of libraries and programs of macOS: imports, exports and the signature of a file.

    python tools/macos/macho.py dist/*macosx*.whl    # prints the oldest macOS and counts the symbols of each file

Only files for 64-bit arm64 are supported. Apple's headers <mach-o/loader.h>, <mach-o/nlist.h>, <mach-o/fixup-chains.h>
and <kern/cs_blobs.h> define the formats. The names in capitals below are from these headers.
"""

import hashlib
import struct
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

# Load commands
LC_SYMTAB = 0x2
LC_ID_DYLIB = 0xD
LC_CODE_SIGNATURE = 0x1D
LC_BUILD_VERSION = 0x32
LC_DYLD_INFO_ONLY = 0x80000022
LC_DYLD_EXPORTS_TRIE = 0x80000033
LC_DYLD_CHAINED_FIXUPS = 0x80000034
LC_RPATH = 0x8000001C
LC_LOAD_LIBRARY = {0xC, 0x80000018, 0x8000001F, 0x80000023}  # LOAD, LOAD_WEAK, REEXPORT and LOAD_UPWARD of a DYLIB

# Flags in the header of a file. With one of them, macOS's loader dyld merges the file's weak symbols with those of
# other files.
MH_WEAK_DEFINES = 0x8000
MH_BINDS_TO_WEAK = 0x10000

EXPORT_SYMBOL_FLAGS_WEAK_DEFINITION = 0x4
CS_ADHOC = 0x2


@dataclass(frozen=True)
class Import:
    name: str
    library: str | None
    """The library from which the symbol must come. None if dyld searches several libraries."""


@dataclass
class MachO:
    flags: int
    install_name: str | None = None
    libraries: list[str] = field(default_factory=list)
    rpaths: list[str] = field(default_factory=list)
    min_os: tuple[int, int] | None = None
    symbol_imports: list[Import] = field(default_factory=list)
    """Undefined symbols of the symbol table."""
    imports: list[Import] = field(default_factory=list)
    """The chained imports, which dyld reads. A file that has dyld's older opcodes instead has no chained imports."""
    exports: dict[str, int] = field(default_factory=dict)
    """The flags of each exported symbol, by name."""


def read(path: Path) -> MachO:
    data = path.read_bytes()
    commands = _load_commands(data, path)
    file = MachO(flags=struct.unpack_from("<I", data, 24)[0])
    for command, at, _ in commands:
        if command == LC_ID_DYLIB:
            file.install_name = _command_string(data, at)
        elif command in LC_LOAD_LIBRARY:
            file.libraries.append(_command_string(data, at))
        elif command == LC_RPATH:
            file.rpaths.append(_command_string(data, at))
        elif command == LC_BUILD_VERSION:
            (version,) = struct.unpack_from("<I", data, at + 12)
            file.min_os = (version >> 16, version >> 8 & 0xFF)
    for command, at, _ in commands:
        if command == LC_SYMTAB:
            file.symbol_imports = _symbol_imports(data, at, file.libraries)
        elif command == LC_DYLD_CHAINED_FIXUPS:
            file.imports = _chained_imports(data, at, file.libraries)
        elif command == LC_DYLD_EXPORTS_TRIE:
            file.exports = _exports(data, *struct.unpack_from("<II", data, at + 8))
        elif command == LC_DYLD_INFO_ONLY:
            file.exports = _exports(data, *struct.unpack_from("<II", data, at + 40))
    return file


def signature_errors(path: Path) -> list[str]:
    """Check the ad-hoc signature, without which macOS on arm64 ends a process. Returns a message for each error."""
    data = path.read_bytes()
    signatures = [at for command, at, _ in _load_commands(data, path) if command == LC_CODE_SIGNATURE]
    if len(signatures) != 1:
        return [f"got {len(signatures)} signatures, expected one"]
    start, size = struct.unpack_from("<II", data, signatures[0] + 8)
    errors = [] if start + size == len(data) else ["the signature is not at the end of the file"]
    magic, _, count = struct.unpack_from(">III", data, start)
    if magic != 0xFADE0CC0:  # CSMAGIC_EMBEDDED_SIGNATURE
        return [*errors, f"signature: magic {magic:#x}"]
    blobs = [start + struct.unpack_from(">II", data, start + 12 + 8 * i)[1] for i in range(count)]
    directories = [at for at in blobs if struct.unpack_from(">I", data, at)[0] == 0xFADE0C02]  # CSMAGIC_CODEDIRECTORY
    if len(directories) != 1:
        return [*errors, f"got {len(directories)} code directories, expected one"]
    return errors + _page_errors(data, start, directories[0])


def _page_errors(data: bytes, signature: int, directory: int) -> list[str]:
    (_, _, _, flags, hashes, _, _, count, covered, hash_size, hash_type, _, page_bits) = struct.unpack_from(
        ">IIIIIIIIIBBBB", data, directory
    )
    errors = []
    if not flags & CS_ADHOC:
        errors.append(f"flags {flags:#x}, expected an ad-hoc signature")
    if (hash_type, hash_size) != (2, 32):
        errors.append(f"hash type {hash_type}, expected SHA-256")
    page_size = 1 << page_bits
    if covered != signature or count != -(-covered // page_size):
        errors.append(f"{count} pages up to byte {covered}, expected all up to byte {signature}")
    for i in range(count):
        page = data[i * page_size : min((i + 1) * page_size, covered)]
        at = directory + hashes + 32 * i
        if hashlib.sha256(page).digest() != data[at : at + 32]:
            errors.append(f"page {i} differs from its hash")
    return errors


def _load_commands(data: bytes, path: Path) -> list[tuple[int, int, int]]:
    """Return (command, offset, size) for each load command. Raises ValueError if the file is not for 64-bit arm64."""
    magic, cpu = struct.unpack_from("<II", data, 0)
    if (magic, cpu) != (0xFEEDFACF, 0x0100000C):
        raise ValueError(f"{path}: got magic {magic:#x} and CPU {cpu:#x}, expected a 64-bit Mach-O file for arm64")
    (count,) = struct.unpack_from("<I", data, 16)
    commands, at = [], 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", data, at)
        commands.append((command, at, size))
        at += size
    return commands


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _command_string(data: bytes, at: int) -> str:
    """Return the string of the load command at `at`. The first field of the command is the offset of the string."""
    return _string(data, at + struct.unpack_from("<I", data, at + 8)[0])


def _import(name: str, ordinal: int, libraries: list[str]) -> Import:
    """Return the import of symbol `name`. `ordinal` counts the libraries from 1.

    If `ordinal` is 0 or one of the highest values, which have special meanings, the library is None.
    """
    return Import(name, libraries[ordinal - 1] if 0 < ordinal <= len(libraries) else None)


def _symbol_imports(data: bytes, at: int, libraries: list[str]) -> list[Import]:
    symbols, count, strings, _ = struct.unpack_from("<IIII", data, at + 8)
    imports = []
    for i in range(count):
        name, kind, _, description, _ = struct.unpack_from("<IBBHQ", data, symbols + 16 * i)
        # Undefined and external: N_UNDF | N_EXT. The mask ignores the bit N_PEXT. Debug entries have other bits set.
        if kind & 0xEF == 0x01:
            imports.append(_import(_string(data, strings + name), description >> 8, libraries))
    return imports


def _chained_imports(data: bytes, at: int, libraries: list[str]) -> list[Import]:
    (start,) = struct.unpack_from("<I", data, at + 8)
    _, _, table, strings, count, format, _ = struct.unpack_from("<IIIIIII", data, start)
    if format != 1:  # DYLD_CHAINED_IMPORT
        raise ValueError(f"imports in format {format}, expected 1")
    imports = []
    for i in range(count):
        (bits,) = struct.unpack_from("<I", data, start + table + 4 * i)
        imports.append(_import(_string(data, start + strings + (bits >> 9)), bits & 0xFF, libraries))
    return imports


def _exports(data: bytes, start: int, size: int) -> dict[str, int]:
    """Return the exports. The file stores them as a tree, in which each edge adds characters to a name."""
    found, todo = {}, [(0, b"")] if size else []
    while todo:
        node, name = todo.pop()
        length, at = _uleb(data, start + node)
        if length:
            found[name.decode()] = _uleb(data, at)[0]
        at += length
        edges = data[at]
        at += 1
        for _ in range(edges):
            end = data.index(b"\0", at)
            child, after = _uleb(data, end + 1)
            todo.append((child, name + data[at:end]))
            at = after
    return found


def _uleb(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned LEB128 number at `at`, and the offset of the first byte after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def main() -> None:
    (wheel,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        for path in sorted(p for p in Path(folder).rglob("*") if p.suffix == ".dylib" or p.parent.name == "bin"):
            file = read(path)
            system = ".".join(map(str, file.min_os))
            print(f"{path.name}: macOS {system}, imports {len(file.imports)} symbols, exports {len(file.exports)}")


if __name__ == "__main__":
    main()
