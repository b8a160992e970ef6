"""Writes stubs of macOS's system libraries, which take the place of Apple's SDK.

A stub is a text file with a list of the library's symbols, against which a linker can link. The format is TAPI's "tbd",
version 4.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import macho

LIBCXX = "/usr/lib/libc++.1.dylib"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"

# Symbols of libc++ that this project needs and the wheels do not import. Add a symbol only if macOS 14 has it: LLVM 16
# lists the symbols for Apple in libcxx/lib/abi/*-apple-*.abilist. If a symbol is missing here, the linker names it.
LIBCXX_ALSO = {
    "__ZNSt3__113basic_istreamIcNS_11char_traitsIcEEE4peekEv",  # std::istream::peek()
    "__ZNSt3__113basic_istreamIcNS_11char_traitsIcEEErsERd",  # std::istream::operator>>(double&)
    "__ZNSt3__113basic_istreamIcNS_11char_traitsIcEEErsERi",  # std::istream::operator>>(int&)
    "__ZNSt3__113basic_ostreamIcNS_11char_traitsIcEEElsEl",  # std::ostream::operator<<(long)
    "__ZNSt3__13cinE",  # std::cin
    "__ZNSt3__16locale7classicEv",  # std::locale::classic()
    "__ZNSt3__16localeaSERKS0_",  # std::locale::operator=(const std::locale&)
    "__ZNSt3__18ios_base5imbueERKNS_6localeE",  # std::ios_base::imbue(const std::locale&)
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
    """Write a stub with the symbols that the libraries of the macOS 14 wheels import from libc++.

    macOS 14 has all of these symbols, because the wheels run there.
    """
    symbols = set(LIBCXX_ALSO)
    for library in wheel_libraries:
        symbols |= {each.name for each in macho.read(library).symbol_imports if each.library == LIBCXX}
    stub.write_text(TEMPLATE.format(install_name=LIBCXX, symbols=", ".join(f"'{name}'" for name in sorted(symbols))))


def write_libsystem(stub: Path, zig_stub: Path) -> None:
    """Copy zig's stub of the C library, without the targets for the CPU arm64e.x1, which LLVM 19 does not know."""
    stub.write_text(re.sub(r"arm64e\.x1-\w+,?", "", zig_stub.read_text()))


def symbols(stub: Path) -> set[str]:
    """Return all names that a stub contains, among them the symbols."""
    return set(re.findall(r"[\w$.]+", stub.read_text()))
