set(SHERD_WARNINGS -Wall -Wextra -Wpedantic -Wshadow=local -Wno-psabi)

# Flags shared by every target of the project: no implicit contraction, so that a sum means the same
# in every translation unit and instruction set (docs/guarantees.md, "Equal to the bit").
add_library(sherd_build_flags INTERFACE)
set_target_properties(sherd_build_flags PROPERTIES EXPORT_NAME build_flags)
target_compile_features(sherd_build_flags INTERFACE cxx_std_20)
set(c_or_cxx $<COMPILE_LANGUAGE:C,CXX>)  # nvcc takes others: sherd_optional_folder
target_compile_options(sherd_build_flags INTERFACE
  $<BUILD_INTERFACE:$<${c_or_cxx}:${SHERD_WARNINGS}>> $<BUILD_INTERFACE:$<${c_or_cxx}:-ffp-contract=off>>)
# GCC collects its garbage over and over where precompiled headers fill its heap, which takes a tenth of its time; with this it
# begins at 600 MB.
target_compile_options(sherd_build_flags INTERFACE
  "$<BUILD_INTERFACE:$<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=600000;--param=ggc-min-expand=400>>")
unset(c_or_cxx)

# sherd_precompiled(TARGET OWNER [HEADERS...]): TARGET's sources see HEADERS, which are compiled once, for OWNER (which may be
# TARGET itself, and alone names them): a quarter to a half of what a source takes. Both have the same flags.
# (-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON builds without.)
function(sherd_precompiled target owner)
  if(target STREQUAL owner)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  else()
    target_precompile_headers(${target} REUSE_FROM ${owner})
  endif()
  # Behind such a header GCC 12 tells its false alarms about std::string, which it keeps to itself in the system's headers;
  # and of sources compiled as one it takes each for a header, whose types in unnamed namespaces others would see.
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-array-bounds;-Wno-stringop-overflow;$<$<BOOL:${CMAKE_UNITY_BUILD}>:-Wno-subobject-linkage>>")
  # ccache keeps objects of precompiled headers only for those who allow for macros that the headers might have looked at.
  if(CMAKE_CXX_COMPILER_LAUNCHER)
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${CMAKE_CXX_COMPILER_LAUNCHER}")
  endif()
endfunction()

set(SHERD_STANDARD_HEADERS <algorithm> <atomic> <chrono> <condition_variable> <cstdint> <filesystem> <functional> <map> <memory>
    <mutex> <optional> <set> <span> <sstream> <string> <string_view> <thread> <utility> <vector>)

# sherd_room(NAME [COLD] [FOLDERS folders...] [DEPENDS rooms and libraries...] [PRIVATE libraries...])
# One static library `sherd_NAME` (alias sherd::NAME) from all sources directly in the current folder and in its FOLDERS, whose
# headers are installed; a folder adds other sources itself with target_sources(). COLD: nothing of it runs more than a few times per
# step, and it is compiled in three quarters of the time without the optimiser's last efforts.
function(sherd_room name)
  cmake_parse_arguments(ROOM "COLD" "" "FOLDERS;DEPENDS;PRIVATE" ${ARGN})
  list(TRANSFORM ROOM_FOLDERS APPEND /*.cpp OUTPUT_VARIABLE patterns)
  file(GLOB sources CONFIGURE_DEPENDS *.cpp ${patterns})
  list(FILTER sources EXCLUDE REGEX "/main\\.cpp$")  # a program's, not the library's
  add_library(sherd_${name} STATIC ${sources})
  set_target_properties(sherd_${name} PROPERTIES LINKER_LANGUAGE CXX)
  add_library(sherd::${name} ALIAS sherd_${name})
  set_target_properties(sherd_${name} PROPERTIES EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON)
  target_include_directories(sherd_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(sherd_${name} PUBLIC sherd_build_flags ${ROOM_DEPENDS})
  foreach(library IN LISTS ROOM_PRIVATE)
    if(library IN_LIST SHERD_HEADER_ONLY)
      set(library $<BUILD_INTERFACE:${library}>)
    endif()
    target_link_libraries(sherd_${name} PRIVATE ${library})
  endforeach()
  if(ROOM_COLD)
    target_compile_options(sherd_${name} PRIVATE $<$<CONFIG:Release>:-O1>)
    sherd_precompiled(sherd_${name} sherd_config ${SHERD_STANDARD_HEADERS})
  else()
    sherd_precompiled(sherd_${name} sherd_base ${SHERD_STANDARD_HEADERS})
  endif()
  set_property(GLOBAL APPEND PROPERTY SHERD_ROOMS ${name})
  set_property(GLOBAL PROPERTY SHERD_ROOM_FOLDER_${name} ${CMAKE_CURRENT_SOURCE_DIR})
  set_property(GLOBAL PROPERTY SHERD_ROOM_FOLDERS_${name} . ${ROOM_FOLDERS})
  # How #include lines call it: "nn", "sharding/parallel".
  file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  string(REGEX REPLACE "^src/" "" path ${path})
  set_property(GLOBAL PROPERTY SHERD_ROOM_PATH_${name} ${path})
endfunction()

# sherd_isa_sources(TARGET files...)
# Compiles each file once per instruction set, with SHERD_ISA naming the namespace it must define its
# functions in (portable, avx2, avx512). The caller picks one at run time with base/cpu_isa.h.
function(sherd_isa_sources target)
  set(flags_portable "")
  set(flags_avx2 -mavx2;-mfma;-mf16c;-mbmi2)
  set(flags_avx512 -mavx512f;-mavx512cd;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mf16c;-mbmi2;-mprefer-vector-width=512)
  foreach(isa portable avx2 avx512)
    add_library(${target}_${isa} OBJECT ${ARGN})
    target_compile_definitions(${target}_${isa} PRIVATE SHERD_ISA=${isa} SHERD_ISA_${isa}=1)
    target_compile_options(${target}_${isa} PRIVATE ${flags_${isa}} -fno-math-errno -fno-trapping-math)
    target_include_directories(${target}_${isa} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
    target_link_libraries(${target}_${isa} PRIVATE sherd_build_flags)
    set_target_properties(${target}_${isa} PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD OFF)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${isa}>)
  endforeach()
endfunction()

# The results of kernels follow the CPU's rules: no contraction but explicit fma, denormals flushed to zero, division and
# square roots rounded correctly. constexpr code of base (random streams, small floats) runs on the device too.
set(SHERD_CUDA_FLAGS -std=c++20  # by name: CMake 3.25 knows no CUDA_STANDARD above 17 for nvcc
    -fmad=false -ftz=true -prec-div=true -prec-sqrt=true --expt-relaxed-constexpr
    -Xcompiler=-Wall,-Wextra,-Wshadow=local,-Wno-psabi,-ffp-contract=off)

# sherd_joined_kernels(LIST NAME): LIST's .cu files, in a unity build five as one: half of what nvcc takes for one goes
# to headers. (CMake's own joins those of CUDA from 3.31 on.)
function(sherd_joined_kernels list name)
  if(NOT CMAKE_UNITY_BUILD)
    return()
  endif()
  set(number 0)
  foreach(kernel IN LISTS ${list})
    math(EXPR batch "${number} / 5")
    math(EXPR number "${number} + 1")
    string(APPEND text_${batch} "#include \"${kernel}\"\n")
  endforeach()
  set(joined "")
  foreach(number RANGE ${batch})
    set(file ${CMAKE_CURRENT_BINARY_DIR}/${name}_${number}.cu)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text_${number}}" @ONLY)
    list(APPEND joined ${file})
  endforeach()
  set(${list} ${joined} PARENT_SCOPE)
endfunction()

# sherd_optional_folder(ROOM FOLDER CONDITION [libraries...])
# Where the variable CONDITION holds, adds the room's FOLDER (its .cpp files, and its .cu files by nvcc) and links the libraries;
# elsewhere the stub, FOLDER/stub, whose functions say why nothing is there.
function(sherd_optional_folder room folder condition)
  set(from ${folder})
  if(NOT ${condition})
    set(from ${folder}/stub)
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${from}/*.cpp)
  # Objects of their own, as the emulated GPUs of the tests take the place of some, stubs among them.
  set_source_files_properties(${sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_sources(sherd_${room} PRIVATE ${sources})
  if(NOT ${condition})
    return()
  endif()
  target_link_libraries(sherd_${room} PRIVATE ${ARGN})
  file(GLOB kernels CONFIGURE_DEPENDS ${folder}/*.cu)
  if(kernels)  # objects of their own, so that who links an installed Sherd need not speak CUDA
    string(REPLACE "/" "_" objects "sherd_${room}_${folder}")
    sherd_joined_kernels(kernels ${objects})
    add_library(${objects} OBJECT ${kernels})
    target_compile_options(${objects} PRIVATE ${SHERD_CUDA_FLAGS})
    target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
    target_link_libraries(${objects} PRIVATE sherd_build_flags)
    set_target_properties(${objects} PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD OFF)
    target_sources(sherd_${room} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endif()
endfunction()
