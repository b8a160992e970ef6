# find_package(executorch_mlx) defines the targets executorch_mlx::engine and executorch_mlx::mlx_delegate.
# This file looks for the executorch wheel in the folder that contains the package executorch_mlx. Pass
# -DEXECUTORCH_MLX_WHEELS=<site-packages> to select another folder.
if(NOT EXECUTORCH_MLX_WHEELS)
  cmake_path(SET EXECUTORCH_MLX_WHEELS NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../../../..")
endif()
find_package(executorch QUIET NO_DEFAULT_PATH PATHS "${EXECUTORCH_MLX_WHEELS}/executorch/share/cmake")
if(executorch_FOUND)
  include("${CMAKE_CURRENT_LIST_DIR}/executorch_mlx-targets.cmake")
else()
  set(executorch_mlx_FOUND FALSE)
  set(executorch_mlx_NOT_FOUND_MESSAGE
    "no executorch wheel in ${EXECUTORCH_MLX_WHEELS}: set EXECUTORCH_MLX_WHEELS to the folder that contains it")
endif()
