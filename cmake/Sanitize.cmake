# EXECUTORCH_MLX_SANITIZE instruments our sources: "address" with ASan and UBSan, "thread" with TSan. The wheels are not
# instrumented: an access out of bounds in libmlx is found only if it is a segmentation fault.
set(EXECUTORCH_MLX_SANITIZE "" CACHE STRING "Sanitizers of the build: address (ASan and UBSan), thread (TSan) or empty")
set_property(CACHE EXECUTORCH_MLX_SANITIZE PROPERTY STRINGS "" address thread)
option(EXECUTORCH_MLX_FUZZ "Build the fuzz targets of test/libfuzzer; needs Clang" OFF)

if(EXECUTORCH_MLX_SANITIZE STREQUAL "address")
  # vptr checks compare types across libraries, and the wheels are built with another compiler.
  set(_sanitize -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all)
elseif(EXECUTORCH_MLX_SANITIZE STREQUAL "thread")
  set(_sanitize -fsanitize=thread)
elseif(EXECUTORCH_MLX_SANITIZE)
  message(FATAL_ERROR "EXECUTORCH_MLX_SANITIZE: got \"${EXECUTORCH_MLX_SANITIZE}\", expected address or thread")
endif()

if(EXECUTORCH_MLX_SANITIZE)
  set(_options ${_sanitize} -fno-omit-frame-pointer -g1)
  if(EXECUTORCH_MLX_FUZZ)
    list(APPEND _options -fsanitize=fuzzer-no-link)
  endif()
  add_compile_options(${_options})
  add_link_options(${_sanitize})
  # Our tests start programs from a Python that preloads the sanitizer's shared library. The programs must therefore use
  # the shared library too, and not the static one that Clang links by default.
  if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
    execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-resource-dir
                    OUTPUT_VARIABLE _resources OUTPUT_STRIP_TRAILING_WHITESPACE)
    set(_shared -shared-libsan "LINKER:-rpath,${_resources}/lib/linux")
    add_link_options("$<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:${_shared}>")
  endif()
endif()
