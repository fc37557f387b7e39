#!/usr/bin/env bash
# The project's Python environment.
#
#   bash launch/env.sh setup       make or bring up to date .venv (Python 3.12, versions pinned by constraints.txt)
#   bash launch/env.sh uv ARGS...  run the same uv with the same package index settings
#
# uv is taken from PATH; where there is none, it goes into .venv-bootstrap. Nothing outside this folder is changed.
# A package index, proxy or certificate that you set up for pip or uv is used as it is.
#   PYTHON=/path/to/python3.12     which Python to build on
#   EXTRAS=dev                     which optional dependencies to install (default: demo,dev,wandb)
set -euo pipefail

UV_VERSION=0.13.9 # for .venv-bootstrap only; a uv on PATH is taken whatever its version
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wanted=$(cat "$root/.python-version")

fail() {
    echo "launch/env.sh: error: $*" >&2
    exit 2
}

is_wanted() {
    [ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$wanted" ]
}

# Print the first Python of the wanted version. PYTHON is tried alone when set: a wrong one must not be passed over.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_wanted "$PYTHON" || fail "PYTHON=$PYTHON is not a Python $wanted. Set PYTHON to one, or unset it."
        command -v "$PYTHON"
        return
    fi
    for candidate in "python$wanted" python3 python "${PYENV_ROOT:-$HOME/.pyenv}/versions/$wanted".*/bin/python; do
        if is_wanted "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no Python $wanted on PATH or under pyenv. Install one (pyenv install $wanted) or set PYTHON=/path/to/python$wanted."
}

# Print the path of a working uv.
find_uv() {
    local bootstrap=$root/.venv-bootstrap python
    # A version manager's stand-in may be on PATH without a uv behind it, so ask it.
    if uv --version >/dev/null 2>&1; then
        command -v uv
        return
    fi
    if [ ! -x "$bootstrap/bin/uv" ]; then
        python=$(find_python)
        echo "no uv on PATH: installing uv $UV_VERSION into .venv-bootstrap" >&2
        rm -rf "$bootstrap"
        "$python" -m venv "$bootstrap" >&2 || fail "$python cannot make a virtual environment. On Debian install python$wanted-venv, or put uv on PATH."
        echo '*' >"$bootstrap/.gitignore"
        "$bootstrap/bin/python" -m pip install --quiet "uv==$UV_VERSION" >&2 || fail "pip could not install uv. Check your network and package index settings, or put uv on PATH."
    fi
    echo "$bootstrap/bin/uv"
}

# uv reads none of pip's settings. Hand them on, unless uv has its own.
adopt_pip_settings() {
    local index=${PIP_INDEX_URL:-}
    if [ -z "$index" ] && [ -x "$root/.venv-bootstrap/bin/python" ]; then
        index=$("$root/.venv-bootstrap/bin/python" -m pip config get global.index-url 2>/dev/null || true)
    fi
    if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
        export UV_DEFAULT_INDEX=$index
    fi
    if [ -n "${PIP_EXTRA_INDEX_URL:-}" ] && [ -z "${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-}" ]; then
        export UV_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL
    fi
    if [ -n "${PIP_CERT:-}" ] && [ -z "${SSL_CERT_FILE:-}" ]; then
        export SSL_CERT_FILE=$PIP_CERT
    fi
}

setup() {
    local uv=$1 venv=$root/.venv python
    if ! is_wanted "$venv/bin/python"; then
        python=$(find_python)
        echo "making .venv on $python" >&2
        "$uv" venv --quiet --clear --python "$python" "$venv"
    fi
    echo "installing megatron-qerl and its pinned dependencies into .venv (the first time downloads about 3 GB)" >&2
    cd "$root"
    "$uv" pip install --python "$venv/bin/python" --constraints constraints.txt --build-constraints constraints.txt \
        --editable ".[${EXTRAS:-demo,dev,wandb}]"
}

command=${1:-}
case $command in
    setup | uv) ;;
    *)
        sed -n '2,10p' "${BASH_SOURCE[0]}" | cut -c3- >&2
        exit 2
        ;;
esac
shift
uv=$(find_uv)
adopt_pip_settings
if [ "$command" = uv ]; then exec "$uv" "$@"; fi
setup "$uv"
