# vcpkg install sherd --overlay-ports=FOLDER, where FOLDER/sherd has this file and the source tarball.
vcpkg_extract_source_archive(SOURCE_PATH ARCHIVE "${CMAKE_CURRENT_LIST_DIR}/sherd.tar.xz")

vcpkg_check_features(OUT_FEATURE_OPTIONS features FEATURES
  mpi SHERD_WITH_MPI
  cuda SHERD_WITH_CUDA)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS ${features} -DSHERD_BUILD_TESTS=OFF -DSHERD_BUILD_BENCH=OFF -DSHERD_BUILD_EXAMPLES=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME Sherd CONFIG_PATH lib/cmake/Sherd)
vcpkg_copy_tools(TOOL_NAMES sherd AUTO_CLEAN)

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
