# Sets up a shared library of this project. It exports only its C API, is built into the build folder, and is installed
# into lib/ of the package executorch_mlx, whose folder is next to the folders of the packages executorch and mlx.
function(executorch_mlx_shared_library name)
  set_target_properties(${name} PROPERTIES
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}"
    BUILD_RPATH "${EXECUTORCH_MLX_WHEELS}/executorch/lib;${EXECUTORCH_MLX_WHEELS}/mlx/lib"
    INSTALL_RPATH "$ORIGIN;$ORIGIN/../../executorch/lib;$ORIGIN/../../mlx/lib")
  if(APPLE)
    set_target_properties(${name} PROPERTIES
      INSTALL_RPATH "@loader_path;@loader_path/../../executorch/lib;@loader_path/../../mlx/lib")
    # Without this option, instances of the C++ library's templates would be exported. If libmlx or ExecuTorch's own MLX
    # delegate exports an instance of the same name, dyld uses one of the two for both libraries, although they may come
    # from different compilers.
    target_link_options(${name} PRIVATE "LINKER:-exported_symbol,_executorch_mlx_*")
  endif()
  install(TARGETS ${name} EXPORT executorch_mlx LIBRARY DESTINATION lib)
endfunction()
