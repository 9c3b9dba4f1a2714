# shellcheck shell=bash
# Bare Debian 12 root folders to try packages in, for scripts/check-package and cmake/package/run-containerfile, which
# source this. Root's rights, debootstrap and Debian's packages over a network are needed; the base is kept in a cache.
chroot_cache=${SHERD_CHROOT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sherd}

chroot_needs() {
  ((EUID == 0)) || { echo "$1: root folders take root's rights" >&2; return 1; }
  command -v debootstrap > /dev/null || [[ -s $chroot_cache/bookworm.tar ]] ||
    { echo "$1: this needs debootstrap (Debian: debootstrap)" >&2; return 1; }
}

# new_root FOLDER: a bare Debian 12 there (debootstrap --variant=minbase), with lists of packages.
new_root() {
  local tree=$chroot_cache/bookworm.tree
  if [[ ! -s $chroot_cache/bookworm.tar ]]; then
    echo "chroot: making a bare Debian 12 in $chroot_cache" >&2
    mkdir -p "$chroot_cache"
    rm -rf "$tree"
    debootstrap --variant=minbase bookworm "$tree" > "$chroot_cache/debootstrap.log" 2>&1 ||
      { tail "$chroot_cache/debootstrap.log" >&2; echo "chroot: debootstrap failed: see above" >&2; return 1; }
    in_chroot "$tree" apt-get -q update > "$chroot_cache/debootstrap.log" 2>&1 ||
      { cat "$chroot_cache/debootstrap.log" >&2; return 1; }
    rm -f "$tree"/var/cache/apt/archives/*.deb
    tar -C "$tree" -cf "$chroot_cache/bookworm.tar.part" .
    mv "$chroot_cache/bookworm.tar.part" "$chroot_cache/bookworm.tar"
    rm -rf "$tree"
  fi
  mkdir -p "$1"
  tar -C "$1" -xf "$chroot_cache/bookworm.tar"
  ! [[ -e /etc/resolv.conf ]] || cp -L /etc/resolv.conf "$1/etc/resolv.conf"
}

# in_chroot [--offline] ROOT PROGRAM WORDS...: runs a program there with mounts of its own, which end with it.
# CHROOT_MOUNT names a folder of this machine that it sees under the same name.
in_chroot() {
  local network=()
  if [[ $1 == --offline ]]; then network=(-n); shift; fi
  # shellcheck disable=SC2016  # expanded by that shell
  unshare -m -p -f --kill-child "${network[@]}" bash -c '
    set -e
    root=$1
    shift
    ip link set lo up 2> /dev/null || true
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    mkdir -p "$root/dev/shm"
    mount -t tmpfs shm "$root/dev/shm"
    if [[ -n ${CHROOT_MOUNT:-} ]]; then
      mkdir -p "$root$CHROOT_MOUNT"
      mount --rbind "$CHROOT_MOUNT" "$root$CHROOT_MOUNT"
    fi
    exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM=dumb \
      DEBIAN_FRONTEND=noninteractive ${CHROOT_ENVIRONMENT:-} chroot "$root" "$@"
  ' - "$@"
}
