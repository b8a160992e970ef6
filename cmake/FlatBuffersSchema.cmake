# Finds FlatBuffers, and defines the function
#   flatbuffers_schema(TARGET SCHEMA)   schema.fbs -> <build>/generated/schema_generated.h
# The headers of FlatBuffers and the compiler flatc must have the same version, because a header that flatc generates
# does not compile with FlatBuffers headers of another version. If the headers and the flatc of the system have the
# same version, they are used; otherwise FlatBuffers is downloaded.
set(EXECUTORCH_MLX_FLATBUFFERS_TAG v24.3.25)

find_path(FLATBUFFERS_INCLUDE_DIR flatbuffers/flatbuffers.h)
if(FLATBUFFERS_INCLUDE_DIR)
  cmake_path(GET FLATBUFFERS_INCLUDE_DIR PARENT_PATH _prefix)
  find_program(FLATBUFFERS_FLATC flatc PATHS "${_prefix}/bin" NO_DEFAULT_PATH)
endif()

set(_matching FALSE)
if(FLATBUFFERS_INCLUDE_DIR AND FLATBUFFERS_FLATC)
  foreach(_part MAJOR MINOR REVISION)
    file(STRINGS "${FLATBUFFERS_INCLUDE_DIR}/flatbuffers/base.h" _line
         REGEX "#define FLATBUFFERS_VERSION_${_part} ")
    string(REGEX MATCH "[0-9]+" _value "${_line}")
    list(APPEND _version "${_value}")
  endforeach()
  list(JOIN _version "." _version)
  execute_process(COMMAND "${FLATBUFFERS_FLATC}" --version
                  OUTPUT_VARIABLE _flatc OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(_flatc MATCHES " ${_version}$")
    set(_matching TRUE)
    message(STATUS "FlatBuffers ${_version} found at ${_prefix}")
  endif()
endif()

if(_matching)
  # The headers are copied into a folder of their own. Their original folder may also have headers of another MLX, as
  # Homebrew's folder does, and the compiler must not find these.
  file(COPY "${FLATBUFFERS_INCLUDE_DIR}/flatbuffers" DESTINATION "${CMAKE_BINARY_DIR}/flatbuffers")
  set(_include "${CMAKE_BINARY_DIR}/flatbuffers")
  set(_compiler "${FLATBUFFERS_FLATC}")
  set(_compiler_target "")
else()
  message(STATUS "no FlatBuffers headers with a flatc of the same version on this system: downloading ${EXECUTORCH_MLX_FLATBUFFERS_TAG}")
  find_package(Git QUIET)
  if(Git_FOUND)
    execute_process(
      COMMAND "${GIT_EXECUTABLE}" ls-remote --exit-code --tags
              https://github.com/google/flatbuffers.git ${EXECUTORCH_MLX_FLATBUFFERS_TAG}
      RESULT_VARIABLE _reachable OUTPUT_QUIET ERROR_QUIET TIMEOUT 30)
  endif()
  if(NOT Git_FOUND OR NOT _reachable EQUAL 0)
    message(FATAL_ERROR "FlatBuffers not found and github.com not reachable with git: install libflatbuffers-dev and flatbuffers-compiler")
  endif()
  include(FetchContent)
  set(FLATBUFFERS_BUILD_TESTS OFF CACHE BOOL "" FORCE)
  set(FLATBUFFERS_BUILD_FLATLIB OFF CACHE BOOL "" FORCE)
  set(FLATBUFFERS_BUILD_FLATHASH OFF CACHE BOOL "" FORCE)
  set(FLATBUFFERS_INSTALL OFF CACHE BOOL "" FORCE)
  FetchContent_Declare(flatbuffers
    GIT_REPOSITORY https://github.com/google/flatbuffers.git
    GIT_TAG ${EXECUTORCH_MLX_FLATBUFFERS_TAG} GIT_SHALLOW TRUE)
  FetchContent_MakeAvailable(flatbuffers)
  set(_include "${flatbuffers_SOURCE_DIR}/include")
  set(_compiler "$<TARGET_FILE:flatc>")
  set(_compiler_target flatc)
endif()
set(EXECUTORCH_MLX_FLATC_INCLUDE "${_include}")
set(EXECUTORCH_MLX_FLATC "${_compiler}")
set(EXECUTORCH_MLX_FLATC_TARGET "${_compiler_target}")

function(flatbuffers_schema target schema)
  set(_out "${CMAKE_BINARY_DIR}/generated")
  add_custom_command(
    OUTPUT "${_out}/schema_generated.h"
    COMMAND "${EXECUTORCH_MLX_FLATC}" --cpp --scoped-enums --reflect-names
            -o "${_out}" "${schema}"
    DEPENDS "${schema}" ${EXECUTORCH_MLX_FLATC_TARGET}
    COMMENT "flatc ${schema}")
  add_library(${target} INTERFACE "${_out}/schema_generated.h")
  target_include_directories(${target} SYSTEM INTERFACE "${_out}" "${EXECUTORCH_MLX_FLATC_INCLUDE}")
endfunction()
