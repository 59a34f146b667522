"""Read the body of a control call."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, RootModel, ValidationError

from proxy.errors import ApiError

Body = TypeVar("Body", bound=BaseModel)


class JsonObject(RootModel[dict[str, Any]]):
    """A body of vLLM's whose fields are passed on as they are."""


def takes(shape: type[BaseModel]) -> dict[str, Any]:
    """Return what OpenAPI says of a route that reads its body as `shape`; pass it as the route's `openapi_extra`."""
    schema = shape.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(part: Any, known: dict[str, Any]) -> Any:
    """Put what a JSON schema refers to where it is referred to: the page has no other place for it."""
    if isinstance(part, dict):
        if "$ref" in part:
            return _inlined(known[part["$ref"].rpartition("/")[2]], known)
        return {name: _inlined(value, known) for name, value in part.items()}
    return [_inlined(value, known) for value in part] if isinstance(part, list) else part


async def read(request: Request, shape: type[Body]) -> Body:
    """Return the body as `shape`. Raises ApiError 400 that names the field."""
    try:
        return shape.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"The request body is not valid: {where or 'body'}: {first['msg']}"
        raise ApiError(400, message, reason="bad_request", type="Bad Request", param=where or None) from None
