# Programs that travel with their libraries: what scripts/package puts into a tarball, and what scripts/gpu-bundle
# packs. Which libraries travel, cmake/package/bundle.sh says.

# sherd_beside_libraries(TARGET FOLDERS...): TARGET looks for its libraries in FOLDERS, which are relative to its own.
# The old kind of run path serves the libraries' libraries too, which say nothing of where theirs lie.
function(sherd_beside_libraries target)
  list(TRANSFORM ARGN PREPEND $ORIGIN/)
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${ARGN}")
  target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
endfunction()

if(NOT SHERD_BUNDLE)
  return()
endif()

# What scripts/gpu-bundle packs: the program, the tests that need a GPU and the benchmarks, over one shared library of
# all rooms, so that each room travels once; the folder `bundle` of the build, laid out as a build folder is.
#
# Programs are linked as ever, only that the shared library comes first: what it defines is then never taken from the
# rooms' archives.
if(NOT SHERD_BUILD_TESTS OR NOT SHERD_BUILD_BENCH OR NOT SHERD_HAVE_CUDA)
  message(FATAL_ERROR "SHERD_BUNDLE needs tests, benchmarks and CUDA: ${SHERD_CUDA_REASON}")
endif()

file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/generated/one_library.cpp CONTENT "")
add_library(sherd_one SHARED ${PROJECT_BINARY_DIR}/generated/one_library.cpp)
set_target_properties(sherd_one PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
get_property(rooms GLOBAL PROPERTY SHERD_ROOMS)
foreach(room IN LISTS rooms)
  list(APPEND archives $<TARGET_FILE:sherd_${room}>)
endforeach()
list(TRANSFORM rooms PREPEND sherd_)
# Whole first; then the rooms for what they link.
target_link_libraries(sherd_one PRIVATE -Wl,--whole-archive ${archives} -Wl,--no-whole-archive ${rooms})
add_dependencies(sherd_one ${rooms})
sherd_beside_libraries(sherd_one .)

get_property(bundled GLOBAL PROPERTY SHERD_GPU_TARGETS)
list(APPEND bundled sherd_program test_comm_processes)
list(REMOVE_DUPLICATES bundled)
foreach(target IN LISTS bundled)
  add_dependencies(${target} sherd_one)
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS $<TARGET_FILE:sherd_one>)
  sherd_beside_libraries(${target} lib ../lib ../../lib)
  target_link_options(${target} BEFORE PRIVATE
                      LINKER:--push-state,--no-as-needed $<TARGET_FILE:sherd_one> LINKER:--pop-state)
  list(APPEND files "$<PATH:RELATIVE_PATH,$<TARGET_FILE:${target}>,${PROJECT_BINARY_DIR}>")
endforeach()
list(APPEND files "$<PATH:RELATIVE_PATH,$<TARGET_FILE:sherd_one>,${PROJECT_BINARY_DIR}>" gpu_tests.txt)
list(JOIN files "\n" files)
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/bundle_files.txt CONTENT "${files}\n")
add_custom_target(sherd_bundle DEPENDS ${bundled})
