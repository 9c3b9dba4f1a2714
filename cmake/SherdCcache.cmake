# Compilers run behind ccache where it is installed, unless a launcher was chosen (CMAKE_<LANG>_COMPILER_LAUNCHER, in the
# cache or the environment; empty for none) or this is part of another project, whose business it is. -DSHERD_CCACHE=OFF:
# without.
if(PROJECT_IS_TOP_LEVEL)
  find_program(SHERD_CCACHE ccache DOC "ccache, or OFF to do without")
  mark_as_advanced(SHERD_CCACHE)
  if(SHERD_CCACHE)
    foreach(language C CXX CUDA)
      if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER AND NOT DEFINED ENV{CMAKE_${language}_COMPILER_LAUNCHER})
        set(CMAKE_${language}_COMPILER_LAUNCHER ${SHERD_CCACHE})
      endif()
    endforeach()
  endif()
endif()
