# usage: loop.sh MAKER SCRATCH TASK [COUNT]    in a mount namespace of its own, as root
#
# What a sandbox costs without a server: the namespaces, overlay and processes of an episode, made by unshare(1) or
# bwrap(1) from a shell. With COUNT, that many whole episodes, and a failure if one's verdict is wrong; without, what
# standard input asks for, a word a line, each answered by a line.
maker=$1 d=$2 harness=$3/tests/test.sh count=${4-}
bwrap=${BWRAP:-bwrap}
inside='echo up; exec sleep infinity'

mkdir -p "$d" "$d/base" "$d/merged" && mkfifo "$d/pipe" && exec 8<>"$d/pipe" || exit 1
# In a user namespace of its own, bwrap cannot take a lower that has other mounts below it.
[ "$maker" != bwrap ] || mount --bind / "$d/base" || exit 1

create() {
    mkdir -p "$d/upper/logs/verifier" "$d/upper/app" "$d/work" || exit 1
    if [ "$maker" = bwrap ]; then
        "$bwrap" --unshare-user --unshare-all --overlay-src "$d/base" --overlay "$d/upper" "$d/work" / \
            --proc /proc --dev /dev -- sh -c "$inside" >&8 2>/dev/null &
    else
        mount -t overlay -o "lowerdir=/,upperdir=$d/upper,workdir=$d/work,volatile" overlay "$d/merged" || exit 1
        unshare --user --map-root-user --mount --pid --ipc --uts --net --fork --kill-child --mount-proc \
            --root "$d/merged" sh -c "$inside" >&8 2>/dev/null &
    fi
    outer=$!
    read -r -t 10 <&8 || exit 1
    read -r init <"/proc/$outer/task/$outer/children"  # no newline at its end: not a success
}
run() { nsenter -t "$init" -U -m -p -i -u -n -r -w -- bash -c "$@"; }
verify() {
    run 'cd /app && . "$0"' "$harness"
    read -r reward <"$d/upper/logs/verifier/reward.txt"
}
destroy() {
    kill -9 "$init"
    wait "$outer" 2>/dev/null
    [ "$maker" = bwrap ] || umount "$d/merged" || exit 1
    rm -rf "$d/upper" "$d/work"
}
episode() {
    create
    run true; run true; run true; run true
    run 'echo ok > /app/out.txt'
    verify
    destroy
    [ "$reward" = 1 ] || exit 1
}

if [ -n "$count" ]; then
    for ((i = 0; i < count; i++)); do episode; done
    exit
fi
while read -r word; do
    case $word in
        create | destroy | verify) "$word" ;;
        exec) run true ;;
        *) exit 1 ;;
    esac
    echo "$word"
done
