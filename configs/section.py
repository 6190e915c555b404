"""What every section of the configuration is."""

from __future__ import annotations

import pydantic


class Section(pydantic.BaseModel):
    """Base of all sections: frozen, unknown keys refused, docstrings under fields become descriptions."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
