#!/usr/bin/env bash
# Makes .venv with everything Deepwell needs, at the versions of constraints.txt. Safe to repeat and to interrupt.
#
#   ./setup.sh                      the first suitable of python3, python3.13 ... python3.10
#   PYTHON=python3.12 ./setup.sh    this one
#
# A torch >= 2.11 that the chosen Python can already see is kept, with the packages beside it; otherwise torch is
# installed at the pinned version. A finished .venv is recognised by its stamp and nothing is downloaded again.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
cd "$here"
venv=$here/.venv
stamp=$venv/.deepwell-ready
unfinished=$venv/.deepwell-unfinished
made_from=$venv/.deepwell-python

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# Two set-ups at once would install over each other: the second waits (flock comes with every Debian and Ubuntu).
if command -v flock >/dev/null; then
  exec 9<"$here/setup.sh"
  flock 9
fi

# ---- which Python ----

# Prints the interpreter's own path when its version is one that Deepwell is tested with.
is_supported='import sys; sys.exit(1) if not (3, 10) <= sys.version_info[:2] <= (3, 13) else print(sys.executable)'

choose_python() {
  local name found
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is no command here; give the name or path of a Python 3.10 to 3.13"
    found=$("$PYTHON" -c "$is_supported") ||
      die "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1); Deepwell needs Python 3.10 to 3.13"
    # An activated .venv offers its own interpreter, which cannot be the one that .venv is made from.
    case "$found" in "$venv"/*) ;; *) printf '%s\n' "$found" && return ;; esac
  fi
  # A .venv that is there keeps the Python it was made from, so that `make test` does not undo `PYTHON=... ./setup.sh`.
  if [ -f "$made_from" ] && name=$(<"$made_from") && found=$("$name" -c "$is_supported" 2>/dev/null); then
    printf '%s\n' "$found" && return
  fi
  for name in python3 python3.13 python3.12 python3.11 python3.10; do
    found=$(PATH=${PATH//"$venv/bin:"/} "$name" -c "$is_supported" 2>/dev/null) || continue
    printf '%s\n' "$found" && return
  done
  die "no Python 3.10 to 3.13 found (python3 is: $(python3 --version 2>&1 || true))." \
    "On Debian 12, Ubuntu 22.04 or newer: sudo apt install python3 python3-venv" \
    "Or name one that is elsewhere: PYTHON=/path/to/python3.12 ./setup.sh"
}

# Prints four fields: version, torch to keep (or nothing), site-packages of a surrounding virtual environment (or
# nothing), and the key: a digest of what the finished .venv depends on.
facts='
import hashlib, os, re, sys, sysconfig
from importlib import metadata
root = sys.argv[1]
version = "%d.%d" % sys.version_info[:2]
try:
    torch = metadata.version("torch")
except metadata.PackageNotFoundError:
    torch = ""
if torch and tuple(map(int, re.findall(r"\d+", torch)[:2])) < (2, 11):
    torch = ""
parent = sysconfig.get_path("purelib") if torch and sys.prefix != sys.base_prefix else ""
digest = hashlib.sha256()
for part in (version, torch, parent, root):
    digest.update(part.encode() + b"\0")
for name in ("pyproject.toml", "constraints.txt"):
    with open(os.path.join(root, name), "rb") as file:
        digest.update(file.read() + b"\0")
print(version, torch, parent, digest.hexdigest(), sep="|")
'

python=$(choose_python)
found=$("$python" -c "$facts" "$here")
IFS='|' read -r version kept_torch parent_site key <<<"$found"

if [ -f "$stamp" ] && [ "$(<"$stamp")" = "$key" ] && [ -x "$venv/bin/python" ]; then
  say "ready (.venv, Python $version)"
  exit 0
fi

# ---- the virtual environment ----

# A .venv can be used further if it is whole, of the same Python, and sees outside packages exactly when torch is kept.
usable() {
  [ ! -e "$unfinished" ] && [ -f "$venv/pyvenv.cfg" ] || return 1
  local sees_outside=false
  [ -z "$kept_torch" ] || sees_outside=true
  grep -qi "^include-system-site-packages = $sees_outside" "$venv/pyvenv.cfg" || return 1
  "$venv/bin/python" -c "import sys, pip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null
}

make_venv() {
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python ($version) cannot make virtual environments. On Debian or Ubuntu: sudo apt install python$version-venv"
  "$python" -m venv --clear --without-pip "$venv"
  : >"$unfinished"
  "$venv/bin/python" -m ensurepip --default-pip >/dev/null
  [ -n "$kept_torch" ] || return 0
  # Up to Python 3.11 ensurepip brings an old setuptools along, which would hide a newer one outside.
  "$venv/bin/python" -m pip uninstall --quiet --yes setuptools 2>/dev/null
  # Opened to outside packages only now: ensurepip would be content with a pip outside, and `pip` then install there.
  "$python" -m venv --without-pip --system-site-packages "$venv"
  if [ -n "$parent_site" ]; then
    # venv passes through the packages of the base Python only, not those of a virtual environment around it.
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' "$parent_site" >"$site/_deepwell_parent.pth"
  fi
}

if usable; then
  say "updating .venv (Python $version)"
else
  [ ! -e "$venv" ] || say "an unfinished or outdated .venv is replaced"
  say "making .venv with $python ($version)"
  make_venv
fi
: >"$unfinished"
printf '%s\n' "$python" >"$made_from"

# ---- the packages ----

# Without compiling: Python compiles what it imports, a small part of torch and transformers, and a minute is saved.
pip_options=(--disable-pip-version-check --no-compile)
[ -t 1 ] || pip_options+=(--quiet)

pip_install() {
  local status=0
  "$venv/bin/python" -m pip install "${pip_options[@]}" "$@" || status=$?
  [ "$status" -ne 0 ] || return 0
  # pip downloads everything before it installs anything, so .venv is whole unless pip was killed.
  [ "$status" -gt 128 ] || rm -f "$unfinished"
  die "pip could not install the packages (its message stands above)." \
    "The first set-up needs a package index; docs/troubleshooting.md says what to do without one."
}

# The pins that hold here: torch and triton as installed, nothing else that a kept torch brings along.
pins='
import re, sys
from importlib import metadata
keep_installed = sys.argv[1] != ""
installed = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
for line in open("constraints.txt", encoding="utf-8"):
    name = line.split("==")[0].strip().lower()
    if line.startswith("#") or not name:
        continue
    if name in ("torch", "triton") and name in installed:
        print(f"{name}=={installed[name]}")
    elif not (keep_installed and re.sub(r"[-_.]+", "-", name) in installed):
        print(line.strip())
'
effective=$venv/constraints-here.txt

if [ -n "$kept_torch" ]; then
  say "keeping torch $kept_torch and the packages beside it"
else
  torch_pin=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)
  say "installing $torch_pin"
  # torch alone and exactly pinned: a range would let pip choose another build. A CUDA build brings its own triton.
  grep -v '^triton==' constraints.txt >"$effective"
  pip_install -c "$effective" "$torch_pin"
fi

say "installing Deepwell with the packages of constraints.txt"
"$venv/bin/python" -c "$pins" "$kept_torch" >"$effective"
# setuptools first and no isolated build: the build then uses the pinned setuptools and downloads nothing of its own.
pip_install -c "$effective" 'setuptools>=77'
pip_install -c "$effective" --no-build-isolation -e '.[hf,tensorboard,dev]'

# ---- a browser for the tests of the HTML pages, where the system gives one ----

has_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

# Debian only: Ubuntu's chromium is a snap, which containers cannot install.
if ! has_browser >/dev/null; then
  if [ "$(id -u)" = 0 ] && grep -qs '^ID=debian' /etc/os-release && command -v apt-get >/dev/null; then
    say "installing chromium for the tests of the HTML pages"
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 || true
  fi
  has_browser >/dev/null || say "no chromium: the tests marked browser will be skipped (sudo apt install chromium)"
fi

say "checking: $("$venv/bin/python" -c 'import torch, deepwell; print("deepwell", deepwell.__version__, "with torch", torch.__version__)')"
rm -f "$unfinished"
printf '%s\n' "$key" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done"
