# How scripts/package builds: SHERD_PACKAGE is cpu, mpi or cuda, and cpack makes Debian packages of the build folder.
#
# Each kind is the whole program, built with other options, at /usr/lib/sherd/KIND/sherd; /usr/bin/sherd is one of them,
# which update-alternatives chooses. The package `sherd` has the plainest and all that they share, `libsherd-dev` its
# libraries.
set(kinds cpu mpi cuda)
if(NOT SHERD_PACKAGE IN_LIST kinds)
  message(FATAL_ERROR "SHERD_PACKAGE is cpu, mpi or cuda, not ${SHERD_PACKAGE}")
endif()
set(have_cpu ON)
set(have_mpi ${SHERD_HAVE_MPI})
set(have_cuda ${SHERD_HAVE_CUDA})
foreach(kind IN LISTS kinds)
  if(kind STREQUAL SHERD_PACKAGE AND NOT have_${kind})
    message(FATAL_ERROR "The package of kind ${kind} needs what was not found: MPI ${SHERD_HAVE_MPI}; \
CUDA ${SHERD_HAVE_CUDA} ${SHERD_CUDA_REASON}")
  elseif(NOT kind MATCHES "cpu|${SHERD_PACKAGE}" AND have_${kind})
    message(FATAL_ERROR "A package of kind ${SHERD_PACKAGE} has no ${kind}: configure with the option of that off, \
as scripts/package does")
  endif()
endforeach()
if(NOT SHERD_HAVE_LIBURING)
  message(FATAL_ERROR "Packages have io_uring, and liburing was not found (Debian: liburing-dev)")
endif()
if(SHERD_PACKAGE STREQUAL cuda AND NOT (SHERD_HAVE_CUDNN AND SHERD_HAVE_NCCL))
  message(FATAL_ERROR "The CUDA package is built with cuDNN and NCCL: found cuDNN ${SHERD_HAVE_CUDNN}, \
NCCL ${SHERD_HAVE_NCCL} (docs/gpu.md, \"Building\")")
endif()

# Functions that nobody calls are left out, and no path of this machine is written into a file.
set(c_or_cxx $<COMPILE_LANGUAGE:C,CXX>)
foreach(option -ffunction-sections -fdata-sections -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=
               -ffile-prefix-map=${PROJECT_BINARY_DIR}/=)
  add_compile_options($<${c_or_cxx}:${option}>)
endforeach()
unset(c_or_cxx)
add_link_options(LINKER:--gc-sections,--as-needed,-z,relro,-z,now)

set(CMAKE_INSTALL_BINDIR lib/sherd/${SHERD_PACKAGE})
set(CMAKE_INSTALL_DOCDIR ${CMAKE_INSTALL_DATADIR}/doc/sherd)

# sherd_debian_files(PACKAGE COMPONENT): the licence and the changes, as Debian wants them of each package.
function(sherd_debian_files package component)
  set(folder ${CMAKE_INSTALL_DATADIR}/doc/${package})
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/package/deb/copyright ${PROJECT_BINARY_DIR}/deb/changelog.gz
                ${PROJECT_BINARY_DIR}/deb/changelog.Debian.gz DESTINATION ${folder} COMPONENT ${component})
endfunction()

# sherd_debian_package(NAME COMPONENT DESCRIPTION [VARIABLE VALUE]...): one package and its fields.
macro(sherd_debian_package name component description)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name})
  set(CPACK_DEBIAN_${upper}_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${description}")
  set(fields ${ARGN})
  while(fields)
    list(POP_FRONT fields field value)
    set(CPACK_DEBIAN_${upper}_PACKAGE_${field} "${value}")
  endwhile()
endmacro()

# What cpack makes of this build, and the program of the tarball.
function(sherd_packages)
  set(from ${PROJECT_SOURCE_DIR}/cmake/package/deb)
  set(to ${PROJECT_BINARY_DIR}/deb)
  set(version ${PROJECT_VERSION}-1)
  set(CPACK_PACKAGE_CONTACT "Sherd maintainers <maintainers@sherd.invalid>")
  string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)  # of SOURCE_DATE_EPOCH
  configure_file(${from}/changelog.in ${to}/changelog @ONLY)
  find_program(GZIP_PROGRAM gzip REQUIRED)
  foreach(pair "${PROJECT_SOURCE_DIR}/CHANGELOG.md;changelog.gz" "${to}/changelog;changelog.Debian.gz")
    list(GET pair 0 text)
    list(GET pair 1 packed)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${text})
    execute_process(COMMAND ${GZIP_PROGRAM} -9nc ${text} OUTPUT_FILE ${to}/${packed} COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
  file(WRITE ${to}/cuda_version "${CUDAToolkit_VERSION}")  # for the bill of materials
  # Debian packs manual pages.
  install(CODE "set(gzip ${GZIP_PROGRAM})" COMPONENT data)
  install(CODE [[
    file(GLOB pages "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/share/man/man1/*.1")
    if(pages)
      execute_process(COMMAND ${gzip} -9nf ${pages} COMMAND_ERROR_IS_FATAL ANY)
    endif()]] COMPONENT data)
  set(priority_cpu 10)
  set(priority_mpi 20)
  set(priority_cuda 30)
  set(priority ${priority_${SHERD_PACKAGE}})
  foreach(script postinst prerm)
    configure_file(${from}/${script}.in ${to}/${script} @ONLY FILE_PERMISSIONS
                   OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
    list(APPEND scripts ${to}/${script})
  endforeach()

  set(CPACK_GENERATOR DEB)
  set(CPACK_PACKAGE_NAME sherd)
  set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  set(CPACK_STRIP_FILES ON)
  set(CPACK_DEB_COMPONENT_INSTALL ON)
  set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
  set(CPACK_DEBIAN_PACKAGE_SECTION science)
  set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
  set(CPACK_DEBIAN_COMPRESSION_TYPE xz)

  set(sharded "Sherd trains transformers that do not fit on one device: it shards weights,\n\
gradients and optimizer states over ranks (ZeRO stages 0 to 3), offloads them\n\
to host memory or NVMe, and splits models by tensor, context, pipeline and\n\
expert. It takes DeepSpeed's configurations and Hugging Face's models.\n.\n")
  if(SHERD_PACKAGE STREQUAL cpu)
    set(CPACK_COMPONENTS_ALL program data development)
    set(CPACK_COMPONENT_PROGRAM_GROUP base)
    set(CPACK_COMPONENT_DATA_GROUP base)
    sherd_debian_package(sherd base
      "sharded training of large transformer models\n\
${sharded}This package has the program for processors, configurations and documentation."
      SUGGESTS "sherd-mpi, sherd-cuda")
    set(CPACK_DEBIAN_BASE_PACKAGE_CONTROL_EXTRA "${scripts}")
    sherd_debian_files(sherd data)
    sherd_debian_files(libsherd-dev development)
    sherd_debian_package(libsherd-dev development
      "sharded training of large transformer models - C++ library\n\
${sharded}This package has the headers, the static libraries and the CMake package for\n\
models of one's own (find_package(Sherd))."
      SECTION libdevel SHLIBDEPS OFF SUGGESTS "cmake, sherd (= ${version})"
      DEPENDS "libdnnl-dev, libicu-dev, libpcre2-dev, libsentencepiece-dev, libtbb-dev, liburing-dev (>= 2.3), \
libzstd-dev, pkg-config, zlib1g-dev")
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples/ DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/libsherd-dev/examples
            COMPONENT development PATTERN slurm EXCLUDE)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples/slurm DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/sherd/examples
            COMPONENT data)
  else()
    set(CPACK_COMPONENTS_ALL program)
    set(with_mpi "program with MPI")
    set(more_mpi "This package has the program whose ranks MPI starts (mpirun, srun with PMIx).")
    set(with_cuda "program for NVIDIA GPUs")
    set(more_cuda "This package has the program with CUDA kernels. cuBLASLt is needed on a GPU,\n\
and cuDNN, NVRTC and NCCL are used where they are installed; NVIDIA's packages\n\
bring all of them.")
    set(fields_mpi RECOMMENDS "openmpi-bin")
    string(REGEX MATCH "^[0-9]+" cuda "${CUDAToolkit_VERSION}")
    string(REPLACE "." "-" cuda_minor "${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}")
    set(fields_cuda SUGGESTS "libcublas-${cuda_minor}, cuda-nvrtc-${cuda_minor}, libcudnn9-cuda-${cuda}, libnccl2")
    sherd_debian_package(sherd-${SHERD_PACKAGE} program
      "sharded training of large transformer models - ${with_${SHERD_PACKAGE}}\n${sharded}${more_${SHERD_PACKAGE}}"
      DEPENDS "sherd (= ${version})" ${fields_${SHERD_PACKAGE}})
    set(CPACK_DEBIAN_PROGRAM_PACKAGE_CONTROL_EXTRA "${scripts}")
    sherd_debian_files(sherd-${SHERD_PACKAGE} program)
  endif()
  include(CPack)

  if(NOT SHERD_PACKAGE STREQUAL mpi)  # a cluster has an MPI of its own
    add_executable(sherd_relocatable EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/src/cli/main.cpp)
    target_link_libraries(sherd_relocatable PRIVATE sherd::cli)
    set_target_properties(sherd_relocatable PROPERTIES OUTPUT_NAME sherd
                          RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/relocatable)
    sherd_beside_libraries(sherd_relocatable ../lib)
  endif()
endfunction()
