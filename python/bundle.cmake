# Installs the libraries that `files` need beside them, and their licences to `metadata`; all but libzero, LibTorch, and what is on every
# system with glibc and a C++ library.
cmake_policy(VERSION 3.25)
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${files} RESOLVED_DEPENDENCIES_VAR libraries UNRESOLVED_DEPENDENCIES_VAR missing
     PRE_EXCLUDE_REGEXES "^libzero\\." "^libtorch" "^libc10" "^ld-linux" "^lib(c|m|dl|rt|pthread|gcc_s|stdc\\+\\+|gomp)\\.so")
if(missing)
  message(FATAL_ERROR "Not found: ${missing}. The packages that bring them are installed by `make setup`.")
endif()
foreach(library IN LISTS libraries)
  get_filename_component(name ${library} NAME)
  file(REAL_PATH ${library} file)
  message(STATUS "Into the wheel: ${name}")
  configure_file(${file} "${CMAKE_INSTALL_PREFIX}/libzero/${name}" COPYONLY)
  string(REGEX REPLACE "^(lib[a-z]+).*" "\\1" stem ${name})
  file(GLOB licence /usr/share/doc/${stem}[0-9]*/copyright)
  foreach(file IN LISTS licence)
    configure_file(${file} "${metadata}/licenses/${stem}" COPYONLY)
  endforeach()
endforeach()
