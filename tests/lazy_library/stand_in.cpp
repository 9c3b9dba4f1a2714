// A library with one function, for lazy_library_test.cpp.
extern "C" int sherd_stand_in_twice(int number) {
  return 2 * number;
}
