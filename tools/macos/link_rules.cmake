# Rules that link with ld64.lld. CMake's own rules would link through the compiler, zig, which adds its static libc++.
# The exception types of that libc++ differ from those of libmlx. toolchain.cmake names this file, which CMake reads
# after its own rules.
string(JOIN " " _ld64
  "\"${EXECUTORCH_MLX_LD64}\" -arch arm64 -platform_version macos 14.0 14.0"
  "-adhoc_codesign"  # macOS on arm64 runs only signed code
  "-fixup_chains"    # one list of imports, which the test of the wheel reads
  "-S -x"            # no debug information, no local symbols
  "<LINK_FLAGS> -o <TARGET> <OBJECTS> <LINK_LIBRARIES>"
  "\"${EXECUTORCH_MLX_STUBS}/libc++.1.tbd\" \"${EXECUTORCH_MLX_STUBS}/libSystem.tbd\"")
set(CMAKE_CXX_LINK_EXECUTABLE "${_ld64}")
set(CMAKE_CXX_CREATE_SHARED_LIBRARY "${_ld64} <SONAME_FLAG> <TARGET_INSTALLNAME_DIR><TARGET_SONAME>")
set(CMAKE_CXX_ARCHIVE_CREATE "\"${EXECUTORCH_MLX_ZIG}\" ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "\"${EXECUTORCH_MLX_ZIG}\" ar q <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "\"${EXECUTORCH_MLX_ZIG}\" ranlib <TARGET>")

# Options go to the linker as they are, without the prefixes that a compiler expects.
set(CMAKE_CXX_LINK_MODE LINKER)
set(CMAKE_CXX_LINKER_WRAPPER_FLAG "")
set(CMAKE_CXX_LINK_FLAGS "")
set(CMAKE_CXX_VERBOSE_FLAG "")
set(CMAKE_SHARED_LIBRARY_CREATE_CXX_FLAGS -dylib)
set(CMAKE_SHARED_LIBRARY_RUNTIME_CXX_FLAG "-rpath ")
set(CMAKE_EXECUTABLE_RUNTIME_CXX_FLAG "-rpath ")
