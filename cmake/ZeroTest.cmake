# The functions that declare tests. Each test says in which builds the gate runs it, so that no build compiles the tests of another one; each
# long test says in which of the four shards of the long suite it is. tests/CMakeLists.txt writes build/PRESET/tests.tsv, a line for each
# test, which scripts/gate.py reads.

if(ZERO_SANITIZE STREQUAL "address")
  set(zero_this_build asan)
elseif(ZERO_SANITIZE STREQUAL "thread")
  set(zero_this_build tsan)
else()
  set(zero_this_build release)
endif()

# zero_program(name SOURCES ...): a test, or a program that tests start, linked to libzero. Most tests compute in libzero and LibTorch
# alone: they are not optimised, which takes a third of the time off the compiler, and share a header of their own. Those of a folder that
# sets ZERO_TESTS_COMPUTE are.
function(zero_program name)
  cmake_parse_arguments(arg "" "" "SOURCES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE zero zero_private)
  if(ZERO_TESTS_COMPUTE)
    zero_shared_header(${name})
  else()
    target_compile_options(${name} PRIVATE -O0)
    target_precompile_headers(${name} REUSE_FROM zero_header)
  endif()
  list(LENGTH arg_SOURCES count)
  if(count GREATER 1)
    zero_group_sources(${name})
  endif()
endfunction()

# zero_entry(name COMMAND ... [BUILD release|asan|tsan ...] [SHARD 0..3] [NEEDS python|monitors|trace ...] [TARGETS ...] [WATCHES FILE ...]
#            [PROCESSORS N] [TIMEOUT SECONDS] [LABELS ...] [ENVIRONMENT ...] [PROPERTIES ...]): one ctest entry.
# BUILD: the builds in which the gate runs it [release, or what its folder sets in ZERO_TESTS_BUILD]. Memory errors, bad input, trust, failures
#   and lifecycles are looked for under sanitizers (asan), bits and figures in release; `make test` and `make asan` run all.
# SHARD: it takes over 10 s, and the gate runs it in every fourth submission, and where a file has changed that begins with `tests/FOLDER/`,
#   `zero/FOLDER/` or one of WATCHES. It has the labels `long` and `shardN`. A test with `LABELS long` alone is in a shard that its name gives.
# NEEDS: the gate runs scripts/NAME_environment.sh when the test is due; without the environment the test skips parts, and says so.
# TARGETS: the gate builds these for it.
# PROCESSORS: the cores that it keeps busy [1]; ctest runs as many entries at once as fit. Ranks that are threads wait for each other most of
#   the time, and keep about one busy. A test whose result depends on a clock says RUN_SERIAL ON after PROPERTIES.
set(zero_entry_values SHARD PROCESSORS TIMEOUT)
set(zero_entry_lists COMMAND BUILD NEEDS TARGETS WATCHES LABELS ENVIRONMENT PROPERTIES)
function(zero_entry name)
  cmake_parse_arguments(arg "" "${zero_entry_values}" "${zero_entry_lists}" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${name}: zero_entry does not know ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_BUILD)
    set(arg_BUILD ${ZERO_TESTS_BUILD})
  endif()
  if(NOT arg_BUILD)
    set(arg_BUILD release)
  endif()
  foreach(build IN LISTS arg_BUILD)
    if(NOT build MATCHES "^(release|asan|tsan)$")
      message(FATAL_ERROR "${name}: BUILD is '${arg_BUILD}'; it may be release, asan, tsan, or some of them")
    endif()
  endforeach()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(ZERO_SANITIZE)
    math(EXPR arg_TIMEOUT "3 * ${arg_TIMEOUT}")
  endif()
  if("long" IN_LIST arg_LABELS AND NOT DEFINED arg_SHARD)
    string(MD5 hash ${name})
    string(SUBSTRING ${hash} 0 1 digit)
    math(EXPR arg_SHARD "0x${digit} % 4")
  endif()
  if(DEFINED arg_SHARD)
    if(NOT arg_SHARD MATCHES "^[0-3]$")
      message(FATAL_ERROR "${name}: SHARD is '${arg_SHARD}'; it may be 0, 1, 2 or 3")
    endif()
    list(REMOVE_ITEM arg_LABELS long)
    list(APPEND arg_LABELS long shard${arg_SHARD})
  elseif(zero_this_build IN_LIST arg_BUILD)
    list(APPEND arg_LABELS gate)
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} PROCESSORS ${arg_PROCESSORS} LABELS "${arg_LABELS}"
                       ENVIRONMENT "OMP_NUM_THREADS=1;${arg_ENVIRONMENT}" ${arg_PROPERTIES})
  get_filename_component(folder ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  foreach(list BUILD NEEDS TARGETS WATCHES)
    list(JOIN arg_${list} "," ${list})
  endforeach()
  set_property(GLOBAL APPEND_STRING PROPERTY ZERO_TESTS
               "${name}\t${folder}\t${BUILD}\t${arg_SHARD}\t${NEEDS}\t${TARGETS}\t${WATCHES}\n")
endfunction()

# zero_test(name SOURCES ... [DEPENDS ...] [LEAVE_OUT PATTERN ...] [SANITIZERS_LEAVE_OUT PATTERN ...], and what zero_entry takes): one GoogleTest
# program and one ctest entry. Tests of the program that fit one of the patterns are left out of the entry: under sanitizers those that take
# minutes there and look for other things, bits above all.
function(zero_test name)
  cmake_parse_arguments(arg "" "${zero_entry_values}" "SOURCES;DEPENDS;LEAVE_OUT;SANITIZERS_LEAVE_OUT;${zero_entry_lists}" ${ARGN})
  zero_program(${name} SOURCES ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE zero_test_support GTest::gmock GTest::gtest_main)
  target_sources(${name} PRIVATE $<TARGET_OBJECTS:zero_test_seed>)
  if(ZERO_SANITIZE)
    list(APPEND arg_LEAVE_OUT ${arg_SANITIZERS_LEAVE_OUT})
  endif()
  if(arg_LEAVE_OUT)
    list(JOIN arg_LEAVE_OUT ":" patterns)
    list(APPEND arg_ENVIRONMENT "GTEST_FILTER=-${patterns}")
  endif()
  list(APPEND arg_TARGETS ${name})
  set(arg_COMMAND ${name})
  set(given)
  foreach(keyword IN LISTS zero_entry_values zero_entry_lists)
    if(DEFINED arg_${keyword})
      list(APPEND given ${keyword} ${arg_${keyword}})
    endif()
  endforeach()
  zero_entry(${name} ${given} ${arg_UNPARSED_ARGUMENTS})
  if(arg_DEPENDS)
    add_dependencies(${name} ${arg_DEPENDS})
  endif()
endfunction()
