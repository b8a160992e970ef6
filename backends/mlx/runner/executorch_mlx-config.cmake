# find_package(executorch_mlx) gives executorch_mlx::llm_runner and, alone,
# executorch_mlx::mlx_delegate. The executorch wheel is looked for beside the
# package; -DEXECUTORCH_MLX_WHEELS=<site-packages> names another place.
if(NOT EXECUTORCH_MLX_WHEELS)
  cmake_path(SET EXECUTORCH_MLX_WHEELS NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../../../..")
endif()
find_package(executorch QUIET NO_DEFAULT_PATH PATHS "${EXECUTORCH_MLX_WHEELS}/executorch/share/cmake")
if(executorch_FOUND)
  include("${CMAKE_CURRENT_LIST_DIR}/executorch_mlx-targets.cmake")
else()
  set(executorch_mlx_FOUND FALSE)
  set(executorch_mlx_NOT_FOUND_MESSAGE
    "no executorch wheel in ${EXECUTORCH_MLX_WHEELS}: set EXECUTORCH_MLX_WHEELS to the site-packages it is in")
endif()
