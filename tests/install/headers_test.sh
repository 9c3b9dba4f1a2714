#!/bin/sh
# headers_test.sh COMPILER INCLUDE_FOLDER PROGRAMS...: installed headers include nothing but the standard library
# and each other, each compiles alone, and so do the programs, with nothing else in the path.
compiler=$1
cd "$2" || exit 1
shift 2
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

# shellcheck disable=SC2016
{
  for program; do echo "$program"; done
  echo "$headers"
} | xargs -P "$(nproc)" -I{} sh -c '
  echo "#include \"$2\"" | "$1" -std=c++20 -fsyntax-only -I. -x c++ - && exit
  echo "$2 does not compile alone"
  exit 1
' sh "$compiler" {} && [ -z "$strangers" ]
