"""What every section of the configuration is."""

from __future__ import annotations

import pydantic


class Section(pydantic.BaseModel):
    """Base of all sections: frozen; unknown keys, NaN and infinity refused; docstrings are descriptions."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
