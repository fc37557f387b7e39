"""What all configuration sections share: their base class, the number types with a bound, and names of folders."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _folder_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError("must be letters, digits, '_', '.' or '-', and begin with a letter or digit")
    return name


#: A name that becomes that of a folder.
FolderName = Annotated[str, AfterValidator(_folder_name)]


class Section(BaseModel):
    """Base of all sections: immutable, strict about keys and about types."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
