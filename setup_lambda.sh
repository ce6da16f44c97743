#!/usr/bin/env bash
# Set up a fresh cloud machine (Ubuntu, with or without root): install uv, and the font that charts are drawn with. The
# script can be run again: it changes nothing that is already installed, and downloads nothing twice.
set -euo pipefail
if [ $# -gt 0 ]; then echo "usage: ./setup_lambda.sh, without arguments: installs uv, and the font of the charts"; exit 2; fi

# Boot scripts (cloud-init) and services start without HOME.
if [ -z "${HOME:-}" ]; then unset HOME; export HOME=~; fi
FONT_URL="https://github.com/ipython/xkcd-font/raw/master/xkcd-script/font/xkcd-script.ttf"
FONT_FILE="$HOME/.local/share/fonts/xkcd-script.ttf"
UV_INSTALLER_URL="https://astral.sh/uv/install.sh"

say() { printf '%s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

# The script has at most one temporary file at a time, and removes it however the script ends.
temporary=""
trap 'if [ -n "$temporary" ]; then rm -f "$temporary"; fi' EXIT

# fetch URL FILE: download with curl, or else with wget. An HTTP error such as "404 not found" is a failure, and the
# server's error page is not written to FILE.
fetch() {
    if have curl && curl -fsSL --retry 2 --connect-timeout 15 --max-time 300 -o "$2" "$1"; then return 0; fi
    if have wget && wget -q --tries=3 --timeout=30 -O "$2" "$1"; then return 0; fi
    return 1
}

# Print the path of uv: on the PATH, or in a folder where installers put it.
find_uv() {
    local folder
    if command -v uv 2>/dev/null; then return 0; fi
    for folder in "${UV_INSTALL_DIR:-}" "${XDG_BIN_HOME:-}" "${XDG_DATA_HOME:-}/../bin" "$HOME"/.{local,cargo}/bin; do
        if [ -n "$folder" ] && [ -x "$folder/uv" ]; then
            say "$folder/uv"
            return 0
        fi
    done
    return 1
}

# Run the official installer, after it has been downloaded completely.
install_uv_officially() {
    local status=0
    temporary="$(mktemp)"
    { fetch "$UV_INSTALLER_URL" "$temporary" && [ -s "$temporary" ] && sh "$temporary"; } || status=$?
    rm -f "$temporary"
    temporary=""
    return "$status"
}

# Ubuntu 24.04 and later refuse pip without --break-system-packages. With --user, none of the system's packages change.
install_uv_by_pip() {
    have python3 || return 1
    python3 -m pip install --user uv || python3 -m pip install --user --break-system-packages uv
}

setup_uv() {
    local uv
    if uv="$(find_uv)"; then
        say "uv is installed: $uv"
    else
        say "installing uv"
        install_uv_officially || install_uv_by_pip || true
        if ! uv="$(find_uv)"; then
            printf 'error: uv could not be installed; check the network, or install it by hand (%s)\n' \
                "https://docs.astral.sh/uv/" >&2
            exit 1
        fi
        say "uv is installed: $uv"
    fi
    if ! have uv; then
        say "uv is not on this shell's PATH; run this, or open a new shell:"
        say "    export PATH=\"${uv%/*}:\$PATH\""
    fi
}

# Succeed if a file begins like a TrueType or OpenType font, and not like a network's sign-in page, for example.
is_font() {
    case "$(head -c 4 "$1" | od -An -tx1 | tr -d ' \n')" in
        00010000 | 74727565 | 4f54544f) return 0 ;;
        *) return 1 ;;
    esac
}

# Delete matplotlib's list of fonts, because matplotlib would not search for a new font while the list exists.
forget_matplotlib_fonts() {
    local folder
    for folder in "${MPLCONFIGDIR:-}" "${XDG_CACHE_HOME:-$HOME/.cache}/matplotlib"; do
        if [ -n "$folder" ]; then rm -f "$folder"/fontlist-*.json; fi
    done
}

setup_font() {
    if [ -s "$FONT_FILE" ]; then
        say "the xkcd font is installed: $FONT_FILE"
        return 0
    fi
    # The temporary file is in the font's own folder, so that mv is one rename and never leaves an incomplete font.
    if ! { mkdir -p "${FONT_FILE%/*}" && temporary="$(mktemp "${FONT_FILE%/*}/.download.XXXXXX")"; } 2>/dev/null; then
        warn "${FONT_FILE%/*}: cannot be written; charts will use matplotlib's own font. Run this again to retry."
        return 0
    fi
    if ! fetch "$FONT_URL" "$temporary" || ! is_font "$temporary"; then
        rm -f "$temporary"
        temporary=""
        warn "the xkcd font could not be downloaded; charts will use matplotlib's own font. Run this again to retry."
        return 0
    fi
    chmod 644 "$temporary"
    mv -f "$temporary" "$FONT_FILE"
    temporary=""
    if have fc-cache; then fc-cache -f "${FONT_FILE%/*}" || warn "fc-cache failed; the font may not be seen yet"; fi
    forget_matplotlib_fonts
    say "the xkcd font is installed: $FONT_FILE"
}

setup_uv
setup_font
say "ready"
