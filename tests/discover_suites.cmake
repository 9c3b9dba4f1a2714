# Writes CTest's entries for the test suites of PROGRAM into FILE, one for each, named PREFIX and the suite's name. (With one for
# each of thousands of tests, CTest and the starts of programs take a third of the time.)
# FILTER: GoogleTest's, of the tests to be had; PROPERTIES: CTest's, of every entry, quoted.
execute_process(COMMAND ${PROGRAM} --gtest_list_tests "--gtest_filter=${FILTER}" OUTPUT_VARIABLE listed TIMEOUT 60
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE ";|\\[|\\]" "" listed "${listed}")  # which values of parameters hold, and lists mind
string(REPLACE "\n" ";" listed "${listed}")

set(entries "")
set(suite "")
macro(finish_suite)
  if(tests)
    list(LENGTH tests count)
    list(JOIN tests ":" tests)
    string(REGEX REPLACE "\\.$" "" name "${PREFIX}${suite}")
    # Those with many tests begin first. Skipped: every test of the suite was.
    string(APPEND entries "add_test([==[${name}]==] [==[${PROGRAM}]==] [==[--gtest_filter=${tests}]==])\n"
      "set_tests_properties([==[${name}]==] PROPERTIES COST ${count} ${PROPERTIES}\n"
      "  SKIP_REGULAR_EXPRESSION [==[PASSED  . 0 tests\\.\n(.  SKIPPED . [^\n]*\n)+$]==])\n")
  endif()
  set(tests "")
endmacro()

foreach(line IN LISTS listed)
  string(REGEX REPLACE " *#.*" "" word "${line}")
  if(word MATCHES "^  (.+)")
    list(APPEND tests "${suite}${CMAKE_MATCH_1}")
  elseif(word MATCHES "\\.$")
    finish_suite()
    set(suite "${word}")
  endif()
endforeach()
finish_suite()
file(WRITE ${FILE} "${entries}")
