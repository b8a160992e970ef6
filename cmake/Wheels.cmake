# Finds the executorch and mlx wheels, and defines their targets: executorch::runtime and others, and mlx.
# EXECUTORCH_MLX_WHEELS is the site-packages folder that contains them.
if(NOT EXECUTORCH_MLX_WHEELS)
  find_package(Python 3.11 COMPONENTS Interpreter)
  if(NOT Python_Interpreter_FOUND)
    message(FATAL_ERROR
      "Python 3.11 or newer not found: pass -DPython_EXECUTABLE=<python with the wheels> "
      "or -DEXECUTORCH_MLX_WHEELS=<its site-packages>")
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u, os; print(os.path.dirname(os.path.dirname(u.find_spec('executorch.runtime').submodule_search_locations[0])))"
    OUTPUT_VARIABLE EXECUTORCH_MLX_WHEELS OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET RESULT_VARIABLE _status)
  if(NOT _status EQUAL 0)
    message(FATAL_ERROR
      "${Python_EXECUTABLE} cannot import executorch: pip install executorch==1.5.1 mlx[cpu]==0.32.4, "
      "or pass -DEXECUTORCH_MLX_WHEELS=<site-packages>")
  endif()
endif()

foreach(_wheel executorch/share/cmake/executorch-config.cmake mlx/share/cmake/MLX/MLXConfig.cmake)
  if(NOT EXISTS "${EXECUTORCH_MLX_WHEELS}/${_wheel}")
    message(FATAL_ERROR "${EXECUTORCH_MLX_WHEELS}/${_wheel} not found: install the executorch and mlx wheels there")
  endif()
endforeach()

find_package(executorch REQUIRED NO_DEFAULT_PATH PATHS "${EXECUTORCH_MLX_WHEELS}/executorch/share/cmake")
if(APPLE)
  find_package(MLX REQUIRED CONFIG NO_DEFAULT_PATH PATHS "${EXECUTORCH_MLX_WHEELS}/mlx/share/cmake/MLX")
else()
  # The CMake package in mlx's CUDA wheels requires the CUDA toolkit, the headers of cuDNN and the driver. Only libmlx
  # uses them, at run time. With a target of our own, a machine without a GPU can build the delegate.
  add_library(mlx SHARED IMPORTED)
  set_target_properties(mlx PROPERTIES
    IMPORTED_LOCATION "${EXECUTORCH_MLX_WHEELS}/mlx/lib/libmlx.so"
    INTERFACE_INCLUDE_DIRECTORIES "${EXECUTORCH_MLX_WHEELS}/mlx/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
if(NOT TARGET executorch::runtime)
  message(FATAL_ERROR "the executorch wheel in ${EXECUTORCH_MLX_WHEELS} has no libexecutorch: install version 1.5.1 or newer")
endif()

# executorch's targets add rpaths as link options. One is the absolute path of the wheel: installed binaries would
# search it before INSTALL_RPATH. The others are relative paths: on macOS, they collide with the paths in INSTALL_RPATH.
# All these options are removed. BUILD_RPATH and INSTALL_RPATH of our targets name the folders instead.
get_property(_targets DIRECTORY PROPERTY IMPORTED_TARGETS)
list(FILTER _targets INCLUDE REGEX "^executorch::")
foreach(_target ${_targets})
  get_target_property(_options ${_target} INTERFACE_LINK_OPTIONS)
  if(_options)
    list(FILTER _options EXCLUDE REGEX "^LINKER:-rpath,")
    set_target_properties(${_target} PROPERTIES INTERFACE_LINK_OPTIONS "${_options}")
  endif()
endforeach()

# The target mlx names frameworks (Metal, Accelerate, ...) by their paths on the machine that built the wheel. Only
# libmlx uses these frameworks, and libmlx is already linked with them.
if(APPLE)
  set_target_properties(mlx PROPERTIES INTERFACE_LINK_LIBRARIES "")
endif()
