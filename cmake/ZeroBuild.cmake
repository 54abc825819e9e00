# Compiler flags, ccache and sanitizers.

# Vector code is explicit (Highway), so -O3 gains nothing; it costs compile time and false warnings.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
# -fPIC and not POSITION_INDEPENDENT_CODE: the latter gives programs -fPIE, and g++ then drops the shared precompiled header.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${CCACHE_PROGRAM})
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>
                      "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:SHELL:-Xclang -fno-pch-timestamp>")
endif()

if(ZERO_SANITIZE STREQUAL "address")
  # LibTorch has no type information for `vptr` and `function`.
  set(ZERO_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr,function)
  # The fuzzers need to see where the readers go.
  set(ZERO_OPTIMISED -O1 -fsanitize=fuzzer-no-link -fsanitize-coverage-allowlist=${CMAKE_SOURCE_DIR}/tests/fuzz/covered.txt)
  add_compile_definitions(__SANITIZE_ADDRESS__=1)  # as g++ says it
elseif(ZERO_SANITIZE STREQUAL "thread")
  set(ZERO_SANITIZE_FLAGS -fsanitize=thread)
  set(ZERO_OPTIMISED -O1)
  add_compile_definitions(__SANITIZE_THREAD__=1)
elseif(NOT ZERO_SANITIZE STREQUAL "")
  message(FATAL_ERROR "ZERO_SANITIZE is '${ZERO_SANITIZE}'; it may be address, thread or empty")
endif()
if(ZERO_SANITIZE)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "ZERO_SANITIZE=${ZERO_SANITIZE} is for clang, and the compiler is ${CMAKE_CXX_COMPILER}: use the preset asan or tsan")
  endif()
  # The time to compile counts: what is optimised is so at -O1, and there are vector kernels for two instruction sets.
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-g1 -DNDEBUG")
  add_compile_definitions(HWY_DISABLED_TARGETS=HWY_SSE4|HWY_SSSE3|HWY_AVX3|HWY_AVX3_DL)
endif()
if(ZERO_SANITIZE_FLAGS)
  add_compile_options(${ZERO_SANITIZE_FLAGS} -fno-omit-frame-pointer -g1)
  add_link_options(${ZERO_SANITIZE_FLAGS})
endif()

# The options that every file of ours is compiled with. Everything here is private: an installed libzero imposes none of it.
add_library(zero_private INTERFACE)
target_compile_options(zero_private INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Werror>")
# g++ 12 warns of impossible sizes inside std::string (its bugs 105329 and 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(zero_private INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-stringop-overflow>")
endif()
# at::parallel_for is serial in files compiled without it. ThreadSanitizer cannot see libgomp's barriers; clang would bring an OpenMP of
# its own beside LibTorch's libgomp.
if(NOT ZERO_SANITIZE)
  set(ZERO_OPENMP -fopenmp)  # programs that have such loops link with it, too
endif()
target_compile_options(zero_private INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${ZERO_OPENMP}>")

# LibTorch's include folder brings its own fmt headers, which hide those of the system's library that is
# linked. A folder of links to the system's headers, searched first, restores them.
function(zero_shadow_bundled_headers)
  set(shadow ${CMAKE_BINARY_DIR}/shadow)
  file(MAKE_DIRECTORY ${shadow})
  get_target_property(fmt_include fmt::fmt INTERFACE_INCLUDE_DIRECTORIES)
  find_path(FMT_HEADERS fmt/core.h PATHS ${fmt_include} /usr/include NO_DEFAULT_PATH REQUIRED)
  file(CREATE_LINK ${FMT_HEADERS}/fmt ${shadow}/fmt SYMBOLIC)
  include_directories(BEFORE SYSTEM ${shadow})  # a folder's includes come before those of its targets' dependencies
  target_link_libraries(zero_private INTERFACE fmt::fmt nlohmann_json::nlohmann_json CLI11::CLI11 PkgConfig::HWY
                        Threads::Threads)
endfunction()

# zero_group_sources(target [FILES n]): compiles the sources of each folder in groups of up to n files (8), each group as one file that includes
# them: a file alone costs g++ 4 s for the templates that our precompiled header leaves to be made, a group pays them once. Files that have
# compile options of their own, and kernels that Highway compiles for each instruction set, stay alone. ZERO_GROUP_SOURCES=OFF compiles each
# file alone, which is quicker where one file is changed again and again.
option(ZERO_GROUP_SOURCES "Compile the sources of a folder in groups" ON)
function(zero_group_sources target)
  if(NOT ZERO_GROUP_SOURCES)
    return()
  endif()
  cmake_parse_arguments(arg "" "FILES" "" ${ARGN})
  if(NOT arg_FILES)
    set(arg_FILES 8)
  endif()
  get_target_property(sources ${target} SOURCES)
  get_target_property(folder ${target} SOURCE_DIR)
  set(kept)
  foreach(source IN LISTS sources)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${folder} NORMALIZE)
    get_source_file_property(options ${source} TARGET_DIRECTORY ${target} COMPILE_OPTIONS)
    get_source_file_property(includes ${source} TARGET_DIRECTORY ${target} INCLUDE_DIRECTORIES)
    file(STRINGS ${source} highway REGEX "foreach_target")
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE name)
    if(options OR includes OR highway OR name MATCHES "^\\.\\.")
      list(APPEND kept ${source})
      continue()
    endif()
    cmake_path(GET name PARENT_PATH group)
    string(MAKE_C_IDENTIFIER ${group} group)
    list(APPEND groups ${group})
    list(APPEND group_${group} ${name})
  endforeach()
  list(REMOVE_DUPLICATES groups)
  foreach(group IN LISTS groups)
    # Groups of one size, so that none is left with a file or two.
    list(LENGTH group_${group} count)
    math(EXPR pieces "(${count} + ${arg_FILES} - 1) / ${arg_FILES}")
    math(EXPR size "(${count} + ${pieces} - 1) / ${pieces}")
    math(EXPR last "${pieces} - 1")
    foreach(piece RANGE ${last})
      math(EXPR begin "${piece} * ${size}")
      list(SUBLIST group_${group} ${begin} ${size} files)
      list(TRANSFORM files REPLACE "(.+)" "#include \"\\1\"\n")
      list(JOIN files "" content)
      set(file ${CMAKE_BINARY_DIR}/groups/${target}/${group}_${piece}.cpp)
      file(CONFIGURE OUTPUT ${file} CONTENT "${content}" @ONLY)
      list(APPEND kept ${file})
    endforeach()
  endforeach()
  set_target_properties(${target} PROPERTIES SOURCES "${kept}")
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  # g++ takes a class of an included file with a member of an anonymous namespace for one that other files see, and, with more to inline,
  # an empty std::optional for one that is read.
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage;-Wno-maybe-uninitialized>")
endfunction()

# zero_shared_header(target): the target is compiled as libzero is, with its precompiled header.
function(zero_shared_header target)
  target_compile_options(${target} PRIVATE ${ZERO_OPTIMISED})
  target_precompile_headers(${target} REUSE_FROM zero)
endfunction()
