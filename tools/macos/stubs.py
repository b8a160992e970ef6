"""Writes text stubs of macOS's system libraries: lists of their symbols, in the place of Apple's SDK.

A linker reads a stub as it reads the library. The format is TAPI's "tbd", version 4.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import macho

LIBCXX = "/usr/lib/libc++.1.dylib"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"

# Symbols of libc++ that this project needs and the wheels do not import. Only what macOS 14 has belongs here: the
# symbols that LLVM 16 lists for Apple in libcxx/lib/abi/*-apple-*.abilist. The linker names missing ones.
LIBCXX_ALSO = {
    "__ZNSt3__113basic_istreamIcNS_11char_traitsIcEEE4peekEv",  # std::istream::peek()
    "__ZNSt3__113basic_ostreamIcNS_11char_traitsIcEEElsEl",  # std::ostream::operator<<(long)
    "__ZNSt3__13cinE",  # std::cin
}

TEMPLATE = """--- !tapi-tbd
tbd-version:     4
targets:         [ arm64-macos ]
install-name:    '{install_name}'
exports:
  - targets:     [ arm64-macos ]
    symbols:     [ {symbols} ]
...
"""


def write_libcxx(stub: Path, wheel_libraries: Iterable[Path]) -> None:
    """Lists the symbols that libraries of the macOS 14 wheels import from libc++: macOS 14 has these."""
    symbols = set(LIBCXX_ALSO)
    for library in wheel_libraries:
        symbols |= {each.name for each in macho.read(library).symbol_imports if each.library == LIBCXX}
    stub.write_text(TEMPLATE.format(install_name=LIBCXX, symbols=", ".join(f"'{name}'" for name in sorted(symbols))))


def write_libsystem(stub: Path, zig_stub: Path) -> None:
    """Copies zig's stub of the C library without a CPU that LLVM 19 does not know."""
    stub.write_text(re.sub(r"arm64e\.x1-\w+,?", "", zig_stub.read_text()))


def symbols(stub: Path) -> set[str]:
    """All names that a stub contains."""
    return set(re.findall(r"[\w$.]+", stub.read_text()))
