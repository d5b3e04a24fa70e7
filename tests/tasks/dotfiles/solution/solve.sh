#!/bin/bash
cat >> /root/.bashrc << 'RC'

export FIELD_NOTES=/root/field-notes
_jot() { printf '%s\n' "$*" >> "$FIELD_NOTES/today.txt"; }
alias jot=_jot
mkcd() { mkdir -p -- "$1" && cd -- "$1"; }
_path=":$PATH:"
while [[ $_path == *:/root/bin:* ]]; do _path=${_path//:\/root\/bin:/:}; done
_path=${_path#:}
PATH=/root/bin:${_path%:}
unset _path
RC
