#!/usr/bin/env bash
# scripts/package and scripts/check-package name what is wrong with their words before they begin.
#   package_test.sh FOLDER_OF_SCRIPTS
set -euo pipefail
scripts=${1:?the folder of the scripts}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

refuses() {  # expected exit code, part of the message, words...
  local expected=$1 message=$2 code=0 output
  shift 2
  output=$(bash "$scripts/$1" "${@:2}" 2>&1) || code=$?
  [[ $code == "$expected" && $output == *"$message"* ]] ||
    { printf "FAILED: %s: exit code %s, and no '%s' in:\n%s\n" "$*" "$code" "$message" "$output" >&2; exit 1; }
}

refuses 2 "unknown option '--debs'" package --debs
refuses 2 "--kinds needs a value" package --deb --kinds
refuses 2 "takes cpu, mpi and cuda, not 'gpu'" package --kinds cpu,gpu
refuses 0 "--tarball" package --help
refuses 2 "name the folder" check-package
refuses 2 "there is no part 'debs'" check-package "$work" --part debs
refuses 2 "--steps takes a number, not '0'" check-package "$work" --steps 0
refuses 1 "has no SHA256SUMS" check-package "$work"

# Words are right, and the machine lacks something: an empty PATH but for what the script itself runs.
mkdir "$work/bin"
for program in bash readlink dirname sed git; do ln -s "$(command -v "$program")" "$work/bin/"; done
PATH=$work/bin CUDACXX='' CUDA_HOME=$work refuses 1 "the kind mpi needs mpicc" package --deb --kinds mpi
PATH=$work/bin CUDACXX='' CUDA_HOME=$work refuses 1 "the kind cuda needs nvcc" package --deb --kinds cuda
PATH=$work/bin CUDACXX='' refuses 1 "--deb needs dpkg-shlibdeps" package --deb --kinds cpu
echo "package and check-package refuse what they cannot do"
