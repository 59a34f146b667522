"""Read the body of a control call."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, RootModel, ValidationError

from proxy.errors import ApiError

Body = TypeVar("Body", bound=BaseModel)


class JsonObject(RootModel[dict[str, Any]]):
    """A body of vLLM's whose fields are passed on as they are."""


async def read(request: Request, shape: type[Body]) -> Body:
    """Return the body as `shape`. Raises ApiError 400 that names the field."""
    try:
        return shape.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"The request body is not valid: {where or 'body'}: {first['msg']}"
        raise ApiError(400, message, reason="bad_request", type="Bad Request", param=where or None) from None
