"""Where policies are kept, so that trainer and replicas share them.

    policy_store  the policies of one run: publish, list, delete; the same rules whatever lies below
    files         what those rules need of a place to keep files
    directory     ... a directory, plain or mounted
    hub           ... a bucket of the Hub, over its API: hf://buckets/
    remote        ... anything else that fsspec reaches: s3://, gs://, memory://

STORE/RUN/NAME/                    a policy: the adapter's files, or a checkpoint's, and once it is published
                                   lora_sync_manifest.json
STORE/RUN/NAME/.unloaded           the proxy has acknowledged its unload
STORE/RUN/.staging-PID-RANDOM/     being written, or left by a publisher that was killed (directories only)
STORE/RUN/.lock                    held while a publisher is at work (directories only)
"""

from __future__ import annotations

from pathlib import Path

from proxy.artifacts.bucket import SCHEME
from proxy.errors import SettingsError
from trainer_client.stores.directory import DirectoryFiles
from trainer_client.stores.hub import HubFiles
from trainer_client.stores.policy_store import PolicyStore
from trainer_client.stores.remote import RemoteFiles

_FILE_URL = "file://"
_HUB = "hf://"


def open_store(
    location: str | Path, *, run: str, mount: str | Path | None = None, endpoint: str | None = None
) -> PolicyStore:
    """Return the store of one run at `location`: a directory, a bucket of the Hub, or a URL that fsspec understands.

    `mount` is the absolute path under which replicas see `location`; a directory is seen under its own path unless
    `mount` says otherwise. `endpoint` is the Hub's URL, HF_ENDPOINT unless given. Nothing is read or written yet.
    Raises SettingsError for what cannot work.
    """
    if mount is not None and not Path(mount).is_absolute():
        raise SettingsError(f"mount {str(mount)!r} is not absolute; give the path under which replicas see the store.")
    text = str(location)
    if text.startswith(_HUB) and not text.startswith(SCHEME):
        raise SettingsError(
            f"store {text} is no bucket; give hf://buckets/NAMESPACE/NAME, and a folder in it if you like."
        )
    if "://" in text and not text.startswith(_FILE_URL):
        if mount is None:
            raise SettingsError(
                f"replicas cannot open {text} itself; give mount= (--mount), the path under which they see it."
            )
        files = HubFiles(text, run=run, endpoint=endpoint) if text.startswith(SCHEME) else RemoteFiles(text, run=run)
        return PolicyStore(files, run=run, seen_under=Path(mount))
    root = _absolute(Path(text.removeprefix(_FILE_URL)))
    return PolicyStore(DirectoryFiles(root, run=run), run=run, seen_under=Path(mount or root))


def _absolute(path: Path) -> Path:
    path = path.expanduser().absolute()  # not resolved: replicas may know a mount by its symbolic link alone
    return path.resolve() if ".." in path.parts else path
