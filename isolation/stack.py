"""The stack: what lies below an episode's upper, topmost first, and the options of the overlays that are made of it.

    over the node            shared/layers/NAME/root ..., stored layers ..., shared/mask, base
    over an image of its own shared/layers/NAME/root ..., shared/frame, stored layers ...

Stored layers are folders of the host that many servers share. The node's root may hold them, and a lower layer inside
another's tree is ELOOP: then mask and base are merged into an overlay of their own first, in shared/node, which is the
lowest layer. Overlays can be stacked twice (FILESYSTEM_MAX_STACK_DEPTH), so not where the node's root is one itself.
"""

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import Rung, SandboxSpec

#: What the node's root is merged from, as episodes may see it.
NODE = ("shared/mask", "base")
#: Folders with nothing in them, for overlays of one layer or none: without an upper the kernel wants two.
NOTHING = ("shared/nothing", "shared/void")
_MERGED_NODE = "shared/node"
Options = list[tuple[str, str | None]]

_STRING_MAX = 255  # of an option's value: fsconfig(2)
_NOT_FOR_BUILDING = ("redirect_dir", "metacopy")


@dataclass(frozen=True)
class Ground:
    """What all worktrees of a server stand on. Its folder is the spawner's working directory.

    `own_folders` are top-level folders that have an overlay each over the node's; none where one overlay holds the
    whole root. `stacks`: the node's root can be merged with the mask before stored layers come on top.
    """

    folder: str
    rung: Rung
    own_folders: tuple[str, ...]
    in_memory: bool
    stacks: bool = False


def own_folders(ground: Ground, spec: SandboxSpec) -> tuple[str, ...]:
    """Top-level folders of the episode that have an overlay each."""
    return ground.own_folders if spec.over_node else ()


def lowers(spec: SandboxSpec, node: Sequence[str] = NODE) -> list[str]:
    """The roots of what an episode's upper lies over, topmost first; `node` stands for the node's."""
    layers = [f"shared/layers/{layer}/root" for layer in spec.layers]
    if spec.over_node:
        return [*layers, *spec.stored, *node]
    return [*layers, "shared/frame", *spec.stored]


def lowers_of(ground: Ground, spec: SandboxSpec, top: str) -> list[str]:
    """The same as roots to mount from: of the overlay that holds the top-level folder `top`."""
    return lowers(spec, _node(ground, spec, top) if spec.over_node else ())


def _node(ground: Ground, spec: SandboxSpec, top: str) -> tuple[str, ...]:
    if ground.own_folders and top not in ground.own_folders:
        return NODE[:1]  # folder by folder, the root holds what the mask and the task put there
    if spec.stored and ground.stacks:
        return (_merge_node(ground.rung, top if ground.own_folders else ""),)
    return NODE


def _merge_node(rung: Rung, top: str) -> str:
    """Mount the overlay of the node's root, or of a folder of it, unless it is mounted; answers with its root."""
    below = f"/{top}" if top else ""
    if not os.path.ismount(_MERGED_NODE + below):
        options = lower_options([root + below for root in NODE])
        if rung.xattr_prefix == "user":
            options.append(("userxattr", None))
        os.makedirs(_MERGED_NODE + below, exist_ok=True)
        merged = sc.mount_detached("overlay", [("source", "node"), *options], sc.MOUNT_ATTR_RDONLY)
        sc.move_mount(merged, _MERGED_NODE + below)
        os.close(merged)
    return _MERGED_NODE


def forget_merged_node() -> None:
    """The mask has changed: what is mounted over it stays undefined (overlayfs.rst), so the next one is made anew."""
    if os.path.ismount(_MERGED_NODE):
        sc.umount(_MERGED_NODE)


# ---------------------------------------------------------------- options of overlayfs
def overlay_options(ground: Ground, spec: SandboxSpec, name: str) -> Options:
    """Of the overlay of the root, or of the top-level folder `name`."""
    suffix, below = (f".{name}", f"/{name}") if name else ("", "")
    upper, work = (f"episodes/{spec.name}/{kind}{suffix}" for kind in ("upper", "work"))
    paths = [root + below for root in lowers_of(ground, spec, name)]
    options = lower_options([path for path in paths if not name or _is_folder(path)])
    return [*options, ("upperdir", upper), ("workdir", work), *_pairs(ground.rung, spec)]


def view_options(ground: Ground, spec: SandboxSpec, name: str) -> Options:
    """The same without an upper: read-only, of the stored layers and the node alone."""
    below = f"/{name}" if name else ""
    roots = [*spec.stored, *(_node(ground, spec, name) if spec.over_node else ())]
    paths = [root + below for root in roots if not name or _is_folder(root + below)]
    user = [pair for pair in ground.rung.overlay_pairs if pair[0] == "userxattr"]
    return [*lower_options([*paths, *NOTHING]), *user]


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _pairs(rung: Rung, spec: SandboxSpec) -> Options:
    """In what becomes a stored layer, nothing may lead to other paths of the layers below, whatever the defaults."""
    pairs = rung.overlay_pairs
    if not spec.building or rung.xattr_prefix == "user":  # refused there, and never the default
        return pairs
    kept = [pair for pair in pairs if pair[0] not in _NOT_FOR_BUILDING]
    return [*kept, *((key, "off") for key in (*_NOT_FOR_BUILDING, "index"))]


def lower_options(paths: Sequence[str]) -> Options:
    """Layers, topmost first. One by one they need Linux 6.5, so a few short ones are given as any kernel takes them.

    Raises: OSError for a path that is longer than any option may be.
    """
    for path in paths:
        if len(os.fsencode(path)) > _STRING_MAX:
            message = f"overlayfs takes paths of {_STRING_MAX} characters: let TB2_CACHE_DIR be shorter"
            raise OSError(errno.ENAMETOOLONG, message, path)
    joined = ":".join(paths)
    if len(os.fsencode(joined)) <= _STRING_MAX and not any(set(path) & set(":\\") for path in paths):
        return [("lowerdir", joined)]
    return [("lowerdir+", path) for path in paths]


def mount(spec: SandboxSpec, options: Options, attributes: int) -> int:
    """A detached overlay. Raises: OSError; when stored layers are inside the node's own, saying where to put them."""
    try:
        return sc.mount_detached("overlay", options, attributes)
    except OSError as error:
        if error.errno != errno.ELOOP or not spec.stored:
            raise
        where = "the node's root is an overlay itself, and the stored layers are in it"
        advice = "let TB2_CACHE_DIR be on another file system than / (a volume, a local disk or a tmpfs)"
        raise OSError(error.errno, f"{where}: {advice}; {spec.stored[0]}") from None
