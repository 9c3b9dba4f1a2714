# The umbrella target, and what `cmake --install` puts where: the program with its manual pages, what shells complete by,
# configurations and documents, the rooms' libraries, their public headers (those that lie in a room's folder and its
# FOLDERS) and the package that find_package(Sherd) reads. The component `program` is the executable alone, `development`
# what programs that use the library need; all else, which names no component, is `data`.
get_property(rooms GLOBAL PROPERTY SHERD_ROOMS)
list(REMOVE_ITEM rooms bench cli)  # the program's own

add_library(sherd INTERFACE)
add_library(Sherd::sherd ALIAS sherd)
foreach(room IN LISTS rooms)
  target_link_libraries(sherd INTERFACE sherd_${room})
endforeach()

if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()

set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME data)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Sherd)
list(TRANSFORM rooms PREPEND sherd_ OUTPUT_VARIABLE room_targets)
install(TARGETS sherd sherd_build_flags sherd_dnnl ${room_targets} EXPORT SherdTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(EXPORT SherdTargets NAMESPACE Sherd:: DESTINATION ${package_folder} COMPONENT development)
install(TARGETS sherd_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)

# The program writes its pages and scripts itself.
set(shell_files ${PROJECT_BINARY_DIR}/shell)
add_custom_command(
  OUTPUT ${shell_files}/sherd.fish
  COMMAND sherd_program man --output ${shell_files}/man
  COMMAND sherd_program completion bash > ${shell_files}/sherd
  COMMAND sherd_program completion zsh > ${shell_files}/_sherd
  COMMAND sherd_program completion fish > ${shell_files}/sherd.fish
  DEPENDS sherd_program COMMENT "Writing manual pages and completion" VERBATIM)
add_custom_target(sherd_shell_files ALL DEPENDS ${shell_files}/sherd.fish)
install(DIRECTORY ${shell_files}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${shell_files}/sherd DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES ${shell_files}/_sherd DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES ${shell_files}/sherd.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)

# sherd_install_headers(FOLDER DESTINATION): the headers directly in FOLDER. They include each other as "room/x.h"
# here; a program that uses an installed Sherd may have a folder and a header of that name, so what is installed are
# copies, made at install, that say "sherd/" before that.
function(sherd_install_headers folder destination)
  file(GLOB names RELATIVE ${folder} CONFIGURE_DEPENDS ${folder}/*.h)
  set(copies ${PROJECT_BINARY_DIR}/installed_headers/${destination})
  install(CODE "set(from \"${folder}\")\nset(to \"${copies}\")\nset(names \"${names}\")" COMPONENT development)
  install(CODE [[
    foreach(name IN LISTS names)
      file(READ "${from}/${name}" text)
      string(REPLACE "#include \"" "#include \"sherd/" text "${text}")
      file(CONFIGURE OUTPUT "${to}/${name}" CONTENT "${text}" @ONLY)
    endforeach()]] COMPONENT development)
  list(TRANSFORM names PREPEND ${copies}/)
  install(FILES ${names} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${destination} COMPONENT development)
endfunction()

foreach(room IN LISTS rooms)
  get_property(folder GLOBAL PROPERTY SHERD_ROOM_FOLDER_${room})
  get_property(path GLOBAL PROPERTY SHERD_ROOM_PATH_${room})
  get_property(folders GLOBAL PROPERTY SHERD_ROOM_FOLDERS_${room})
  foreach(below IN LISTS folders)
    cmake_path(SET from NORMALIZE ${folder}/${below})
    cmake_path(SET to NORMALIZE sherd/${path}/${below})
    sherd_install_headers(${from} ${to})
  endforeach()
endforeach()
sherd_install_headers(${PROJECT_SOURCE_DIR}/src/sherd sherd)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/configs DESTINATION ${CMAKE_INSTALL_DATADIR}/sherd)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES ${PROJECT_SOURCE_DIR}/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(NOT SHERD_PACKAGE)  # Debian has its own files for both
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/SherdConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/SherdConfig.cmake INSTALL_DESTINATION ${package_folder})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/SherdConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/SherdConfig.cmake ${PROJECT_BINARY_DIR}/SherdConfigVersion.cmake
        DESTINATION ${package_folder} COMPONENT development)
