# Sourced: makes .venv with the versions of constraints.txt, and $extra if set; quick when it is there.
extra=${extra:-}
want="$extra $(cat pyproject.toml constraints.txt | cksum)"
if [ "$(cat ".venv/installed-$extra" 2>/dev/null)" != "$want" ]; then
    [ -x .venv/bin/python ] || python3 -m venv .venv
    .venv/bin/python -m pip install --quiet -c constraints.txt -e ".${extra:+[$extra]}"
    echo "$want" > ".venv/installed-$extra"
fi
