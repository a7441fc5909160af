"""What the stand-in for the Hub answers to uploads: repositories, branches, preupload, LFS objects and commits."""

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from typing import Any

import yaml

LFS = re.compile(r".*\.(safetensors|png)")  # what the Hub keeps as LFS files
FRONT = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
TOKEN_ROLES = {  # token: the owners whose repositories it may write
    "hf_alice": ("alice", "lab"),
    "hf_bob": ("bob",),
}


@dataclass
class Objects:
    """The uploaded LFS objects by their sha256."""

    stored: dict[str, bytes] = field(default_factory=dict)


class Refused(Exception):  # noqa: N818 - an answer, not an error
    """An answer with an error status."""

    def __init__(self, status: HTTPStatus, message: str, code: str = "", **body: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.body = status, message, code, {"error": message, **body}


def owners(authorization: str | None) -> tuple[str, ...]:
    """The owners that the request's token stands for."""
    if authorization is None:
        return ()
    token = authorization.removeprefix("Bearer ")
    if token not in TOKEN_ROLES:
        raise Refused(HTTPStatus.UNAUTHORIZED, "Invalid credentials in Authorization header")
    return TOKEN_ROLES[token]


def front_matter(card: bytes | None) -> dict[str, Any]:
    """The metadata of a card."""
    found = FRONT.match((card or b"").decode())
    return yaml.safe_load(found[1]) if found else {}


def validate_yaml(body: bytes) -> dict[str, Any]:
    """Answer /api/validate-yaml: the base model and the datasets must be Hub ids."""
    metadata = front_matter(json.loads(body)["content"].encode())
    ids = [*([metadata["base_model"]] if "base_model" in metadata else []), *metadata.get("datasets", [])]
    wrong = [name for name in ids if not re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
    if wrong:
        errors = [{"message": f"{name} is not a Hub id"} for name in wrong]
        raise Refused(HTTPStatus.BAD_REQUEST, "Invalid metadata", errors=errors, warnings=[])
    advice = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
    return {"errors": [], "warnings": advice}


def upload_modes(body: bytes, oids: Mapping[str, str]) -> dict[str, Any]:
    """Answer .../preupload/{branch}: how each file is uploaded, and the id of the file that is there."""
    return {
        "files": [
            {
                "path": file["path"],
                "uploadMode": "lfs" if LFS.fullmatch(file["path"]) else "regular",
                "shouldIgnore": False,
                "oid": oids.get(file["path"]),
            }
            for file in json.loads(body)["files"]
        ]
    }


def lfs_batch(body: bytes, url: str, objects: Objects) -> dict[str, Any]:
    """Answer .../info/lfs/objects/batch: where to upload the objects that are missing."""
    answers = []
    for wanted in json.loads(body)["objects"]:
        oid = wanted["oid"]
        actions = {"upload": {"href": f"{url}/lfs/{oid}"}, "verify": {"href": f"{url}/lfs/{oid}/verify"}}
        answers.append({**wanted, **({} if oid in objects.stored else {"actions": actions})})
    return {"transfer": "basic", "objects": answers}


def store(oid: str, body: bytes, objects: Objects) -> None:
    """Keep the bytes of an LFS object."""
    if sha256(body).hexdigest() != oid:
        raise Refused(HTTPStatus.BAD_REQUEST, "the bytes do not have this sha256")
    objects.stored[oid] = body


def committed(body: bytes, files: Mapping[str, bytes], parent: str, objects: Objects) -> dict[str, bytes]:
    """Return all files after a commit on `parent`, whose body is one JSON document per line."""
    changed = dict(files)
    for line in body.splitlines():
        operation = json.loads(line)
        value = operation["value"]
        if operation["key"] == "file":
            changed[value["path"]] = base64.b64decode(value["content"])
        elif operation["key"] == "lfsFile":
            if value["oid"] not in objects.stored:
                raise Refused(HTTPStatus.BAD_REQUEST, f"{value['path']}: its LFS object was not uploaded")
            changed[value["path"]] = objects.stored[value["oid"]]
        elif operation["key"] == "header":
            if value.get("parentCommit", parent) != parent:
                message = "A commit has happened since. Please refresh and try again."
                raise Refused(HTTPStatus.PRECONDITION_FAILED, message)
        else:
            raise Refused(HTTPStatus.BAD_REQUEST, f"{operation['key']}: not supported by this server")
    return changed
