#!/usr/bin/env bash
# Installs into a temporary prefix, then builds and runs an outside program against it twice: with
# find_package(ouzel) and with pkg-config.
# usage: test.sh CMAKE BUILD_FOLDER VERSION
set -euo pipefail
cmake=$1 build=$2 version=$3
source=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
prefix=$scratch/prefix

"$cmake" --install "$build" --prefix "$prefix" >/dev/null
[ "$("$prefix/bin/ouzel" --version)" = "ouzel $version" ]
"$prefix/bin/ouzel" --man | cmp - "$prefix/share/man/man1/ouzel.1"
bash -n "$prefix/share/bash-completion/completions/ouzel"

# find_package finds what was installed, by the prefix or by the program in PATH, and never the files
# of a package that a build folder holds before it is installed.
found() {  # found FOLDER: where the project that was configured there has its package from
  sed -n 's/^ouzel_DIR:PATH=//p' "$1/CMakeCache.txt"
}
unset ouzel_DIR ouzel_ROOT CMAKE_PREFIX_PATH
PATH=$prefix/bin:$PATH "$cmake" -S "$source/outside" -B "$scratch/path" >/dev/null
[ "$(found "$scratch/path")" = "$prefix/lib/cmake/ouzel" ]
CMAKE_PREFIX_PATH=$prefix PATH=$build:$PATH "$cmake" -S "$source/outside" -B "$scratch/variable" >/dev/null
[ "$(found "$scratch/variable")" = "$prefix/lib/cmake/ouzel" ]
PATH=$build:$PATH "$cmake" -S "$source/outside" -B "$scratch/build" >/dev/null 2>&1 || true
case $(found "$scratch/build") in "$build"*) echo "a build folder in PATH is no package" >&2; exit 1 ;; esac

"$cmake" -S "$source/outside" -B "$scratch/outside" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
[ "$(found "$scratch/outside")" = "$prefix/lib/cmake/ouzel" ]
"$cmake" --build "$scratch/outside" >/dev/null
"$scratch/outside/outside" "$version"

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
[ "$(pkg-config --modversion ouzel)" = "$version" ]
# shellcheck disable=SC2046
c++ -std=c++20 "$source/outside/main.cc" $(pkg-config --cflags --libs ouzel) \
  -Wl,-rpath,"$prefix/lib" -o "$scratch/with_pkg_config"
"$scratch/with_pkg_config" "$version"

# Under an older standard every header of the C++ API says so, and nothing else; ouzel/c.h is for all.
for header in "$prefix"/include/ouzel/*.h; do
  name=ouzel/${header##*/}
  [ "$name" = ouzel/c.h ] && continue
  if said=$(echo "#include <$name>" | LC_ALL=C c++ -std=c++17 -fsyntax-only -I "$prefix/include" -x c++ - 2>&1) ||
    ! [[ $said == *'compile with -std=c++20'* ]] || [ "$(grep -c 'error:' <<<"$said")" -ne 2 ]; then
    echo "$name under C++17 should say that it is C++20, and end there: $said" >&2
    exit 1
  fi
done
for language in 'c++ -std=c++98' 'c++ -std=c++17' 'c -std=c99'; do
  # shellcheck disable=SC2086
  echo '#include <ouzel/c.h>' | c++ -Wall -Wextra -Werror -fsyntax-only -I "$prefix/include" -x $language -
done
