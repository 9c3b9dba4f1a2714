# shellcheck shell=bash
# How a program travels with its libraries, for scripts/package and scripts/gpu-bundle, which source this: which
# libraries go along, and whether the program starts where nothing else of ours is. The program looks for them in a
# folder beside its own (sherd_beside_libraries() in cmake/SherdBundle.cmake).

# Prints "NAME PATH" of each library that the programs $@ load and that travels: all but the C library's parts, which
# belong to the system's dynamic linker, and NVIDIA's, which come with the driver, CUDA or PyTorch. Fails where one is
# missing.
travelling_libraries() {
  local name arrow library
  ldd "$@" | while read -r name arrow library _; do
    [[ $arrow == '=>' ]] || continue
    case $name in
      ld-linux* | libc.so.* | libm.so.* | libpthread.so.* | libdl.so.* | librt.so.* | libresolv.so.*) continue ;;
      libsherd_* | libcuda* | libcublas* | libcudnn* | libnccl* | libnvrtc*) continue ;;
    esac
    [[ $library == /* ]] || { echo "bundle: $name, which a program needs, is not installed here" >&2; return 1; }
    echo "$name $library"
  done | sort -u
}

# Copies the travelling libraries of all programs below the folder $1 to the folder $2.
copy_travelling_libraries() {
  local name library programs libraries
  mapfile -t programs < <(find "$1" -type f -perm -u+x)
  libraries=$(travelling_libraries "${programs[@]}")
  mkdir -p "$2"
  while read -r name library; do
    install "$library" "$2/$name"
  done <<< "$libraries"
}

# Strips all programs and libraries below the folder $1.
strip_programs() { find "$1" -type f -perm -u+x -exec strip --strip-unneeded {} +; }

# Makes $1 a root folder with the C library alone, as of an image with no packages, whose parts the program $2 names.
make_bare_root() {
  local root=$1 library
  mkdir -p "$root"/{proc,dev,tmp,etc}
  for library in $(ldd "$2" | grep -oE '/[^ ]*/(ld-linux[^ /]*|lib(c|m|pthread|dl|rt)\.so\.[0-9]+)') \
    /lib/x86_64-linux-gnu/lib{pthread,dl,rt}.so.*; do
    [[ ! -e $library ]] || install -D "$library" "$root/$library"
  done
}

# in_root ROOT PROGRAM WORDS...: runs a program in a root folder, which takes root's rights, without a network.
in_root() {
  # shellcheck disable=SC2016  # expanded by that shell
  unshare -m -n bash -c 'ip link set lo up 2> /dev/null; mount -t proc proc "$1/proc" && exec chroot "$@"' - "$@"
}

# try_in_root ROOT PROGRAM: the program tells of itself, prepares a small corpus and trains two steps in ROOT.
try_in_root() {
  local root=$1 program=$2
  cp configs/llama_tiny.json "$root/run.json"
  yes 'Sherd trains models that do not fit. ' | head -c 200000 > "$root/text.txt" || true  # `yes` ends by a signal
  {
    in_root "$root" "$program" info &&
      in_root "$root" "$program" prepare --input /text.txt --output /data/corpus --tokenizer byte &&
      in_root "$root" "$program" train --config /run.json --set data.path=/data/corpus --set training.steps=2
  } > "$root/log" 2>&1 || { cat "$root/log" >&2; return 1; }
}
