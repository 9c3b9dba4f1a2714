#!/bin/sh
# headers_test.sh COMPILER SOURCES INCLUDE_FOLDER: installed headers include nothing but the standard library and each
# other; they and the examples compile with nothing else in the path.
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

# Each header alone, which takes minutes, is tried by `scripts/test --full`. Else all are together, the last first, so that
# many of those that lack an include still come before what has it; and one example, as the build compiles all of them
# against such headers.
include_each() { sed 's/.*/#include "&"/'; }
examples=gpt
if [ -n "$SHERD_TEST_FULL" ]; then
  examples='gpt own_model pipeline tensor_parallel_mlp'
  to_compile=$(echo "$headers" | include_each)
else
  mkdir -p ../together
  echo "$headers" | tac | include_each >../together/all.h
  to_compile='#include "../together/all.h"'
fi
# shellcheck disable=SC2016
{
  for example in $examples; do echo "#include \"$sources/examples/$example.cpp\""; done
  echo "$to_compile"
} | xargs -d '\n' -P 2 -I{} sh -c '
  echo "$2" | "$1" -std=c++20 -fsyntax-only -I. -x c++ - && exit
  echo "$2 does not compile"
  exit 1
' sh "$compiler" {} && [ -z "$strangers" ]
