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

# A header that a source of every build includes first has compiled alone in the build: the rest is left to try.
first_includes=$(find "$sources/src" "$sources/sharding" "$sources/offload" "$sources/optim" "$sources/models" \
  \( -name stub -o -name cuda -o -name nccl -o -name mpi \) -prune -o \
  -name '*.cpp' -exec grep -h -m 1 '^#include' {} \;)
to_compile() {
  echo "$sources/examples/gpt.cpp"
  echo "$sources/examples/own_model.cpp"
  echo "$sources/examples/pipeline.cpp"
  echo "$sources/examples/tensor_parallel_mlp.cpp"
  for header in $headers; do
    case $first_includes in
      *"\"${header#sherd/}\""*) ;;
      *) echo "$header" ;;
    esac
  done
}
# shellcheck disable=SC2016
to_compile | xargs -I{} sh -c '
  echo "#include \"$2\"" | "$1" -std=c++20 -fsyntax-only -I. -x c++ - && exit
  echo "$2 does not compile alone"
  exit 1
' sh "$compiler" {} && [ -z "$strangers" ]
