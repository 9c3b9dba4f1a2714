// The target that compiles the tests' precompiled header (tests/CMakeLists.txt) has to have a source.
