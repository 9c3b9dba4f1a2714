# The umbrella target, and what `cmake --install` puts where: the program, the rooms' libraries, their public headers
# (those that lie directly in a room's folder) and the package that find_package(Sherd) reads.
get_property(rooms GLOBAL PROPERTY SHERD_ROOMS)
list(REMOVE_ITEM rooms cli)  # the program's own

add_library(sherd INTERFACE)
add_library(Sherd::sherd ALIAS sherd)
foreach(room IN LISTS rooms)
  target_link_libraries(sherd INTERFACE sherd_${room})
endforeach()

if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Sherd)
list(TRANSFORM rooms PREPEND sherd_ OUTPUT_VARIABLE room_targets)
install(TARGETS sherd sherd_build_flags sherd_dnnl ${room_targets} EXPORT SherdTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT SherdTargets NAMESPACE Sherd:: DESTINATION ${package_folder})
install(TARGETS sherd_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

foreach(room IN LISTS rooms)
  get_property(folder GLOBAL PROPERTY SHERD_ROOM_FOLDER_${room})
  file(GLOB headers CONFIGURE_DEPENDS ${folder}/*.h)
  install(FILES ${headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/sherd/${room})
endforeach()
install(FILES ${PROJECT_SOURCE_DIR}/src/sherd/sherd.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/sherd)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/SherdConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/SherdConfig.cmake INSTALL_DESTINATION ${package_folder})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/SherdConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/SherdConfig.cmake ${PROJECT_BINARY_DIR}/SherdConfigVersion.cmake
        DESTINATION ${package_folder})
