# CMake toolchain file: macOS 14 on arm64 from Linux. zig's Clang compiles, LLVM's ld64.lld links.
# build_wheel.py passes EXECUTORCH_MLX_ZIG and EXECUTORCH_MLX_LD64 (programs), and EXECUTORCH_MLX_STUBS (a folder
# with the text stubs that stubs.py writes).
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_OSX_SYSROOT "" CACHE STRING "")  # zig and the stubs replace Apple's SDK
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES EXECUTORCH_MLX_ZIG EXECUTORCH_MLX_LD64 EXECUTORCH_MLX_STUBS)

set(CMAKE_CXX_COMPILER "${EXECUTORCH_MLX_ZIG}" c++)
set(CMAKE_CXX_COMPILER_TARGET aarch64-macos.14.0)
# The flags give the behaviour of Apple's compiler and SDK: `delete` does not pass the size, libc++'s headers refuse
# functions that macOS 14 lacks, and templates of the standard library are visible outside a library. zig sets the two
# macros to other values, for its own static libc++.
string(JOIN " " CMAKE_CXX_FLAGS_INIT
  -g0 -fno-sanitize=all  # zig adds debug information, and a sanitizer where optimization is off
  -fno-sized-deallocation
  -U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS -D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1
  -U_LIBCPP_DISABLE_VISIBILITY_ANNOTATIONS)

# The build uses the rpaths of the installed files, and the linker leaves out debug information and local symbols.
# So no program has to change a linked file.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_NAME_TOOL /bin/false CACHE FILEPATH "")
set(CMAKE_STRIP "" CACHE FILEPATH "")

set(CMAKE_USER_MAKE_RULES_OVERRIDE "${CMAKE_CURRENT_LIST_DIR}/link_rules.cmake")
