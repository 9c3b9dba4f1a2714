#!/bin/sh
# headers_test.sh COMPILER SOURCES INCLUDE_FOLDER: installed headers include nothing but the standard library and each
# other; they and the examples compile alone, with nothing else in the path.
compiler=$1 sources=$2
cd "$3" || exit 1
headers=$(find sherd -name '*.h' | sort)
if [ "$(echo "$headers" | wc -l)" -lt 50 ]; then
  echo "few headers are installed in $PWD: $headers"
  exit 1
fi

strangers=$(for header in $headers; do
  sed -n 's/^[ \t]*#[ \t]*include[ \t]*\([<"][^>"]*\).*/\1/p' "$header" | while read -r name; do
    case $name in
      '<'*[./]*) echo "$header includes $name>, which is not of the standard library" ;;
      '"'*) [ -f "${name#\"}" ] || echo "$header includes $name\", which is not installed" ;;
    esac
  done
done)
[ -z "$strangers" ] || echo "$strangers"

# Each header alone, which takes minutes, is tried by `scripts/test --full`; else all together, and the examples, whose
# own headers come first.
# shellcheck disable=SC2016
if [ -n "$SHERD_TEST_FULL" ]; then
  to_compile=$(echo "$headers" | sed 's/.*/#include "&"/')
else
  mkdir -p ../together && echo "$headers" | sed 's/.*/#include "&"/' >../together/headers.h
  to_compile='#include "../together/headers.h"'
fi
{
  for example in gpt own_model pipeline tensor_parallel_mlp; do echo "#include \"$sources/examples/$example.cpp\""; done
  echo "$to_compile"
} | xargs -d '\n' -P 2 -I{} sh -c '
  echo "$2" | "$1" -std=c++20 -fsyntax-only -I. -x c++ - && exit
  echo "$2 does not compile alone"
  exit 1
' sh "$compiler" {} && [ -z "$strangers" ]
