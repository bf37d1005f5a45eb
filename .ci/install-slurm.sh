#!/usr/bin/env bash
# Installs what the Slurm test bed needs (tests/slurm/testbed), the shells that Tab is pressed in, and the browser that
# shows reports (tests/unit/operate/browser.py), and only what is missing.
# The packages' own services stay off: the test bed starts daemons of its own, on other ports.
set -euo pipefail

wanted=(slurmctld slurmd slurmdbd slurm-client munge mariadb-server debootstrap procps iproute2
    make util-linux hostname zsh fish gcc libc6-dev chromium)
missing=()
for package in "${wanted[@]}"; do
    state="$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)"
    [ "$state" = installed ] || missing+=("$package")
done
if [ "${#missing[@]}" -eq 0 ]; then
    echo "install-slurm: all ${#wanted[@]} packages are there already"
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "install-slurm: needs root to install: ${missing[*]}" >&2
    exit 1
fi

# invoke-rc.d, with which a package starts its service, asks this script first; 101 is "forbidden".
policy=/usr/sbin/policy-rc.d
kept=""
log="$(mktemp)"
restore() {
    if [ -n "$kept" ]; then
        mv -f "$kept" "$policy"
    else
        rm -f "$policy"
    fi
    rm -f "$log"
}
if [ -e "$policy" ] || [ -L "$policy" ]; then
    kept="$(mktemp "$policy.XXXXXX")"
    mv -f "$policy" "$kept"
fi
trap restore EXIT
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod 755 "$policy"

export DEBIAN_FRONTEND=noninteractive
quietly() {
    if ! "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "install-slurm: failed: $*" >&2
        exit 1
    fi
}
quietly apt-get update
quietly apt-get install --yes --no-install-recommends "${missing[@]}"
version="$(dpkg-query -W -f='${Version}' slurmctld)"
echo "install-slurm: installed ${#missing[@]} packages (Slurm $version), no service started"
