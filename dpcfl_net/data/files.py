"""Settings of data sets in the user's files: where the files are, and what is in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dpcfl_net.core.frozen import StrictModel

FORMATS = ("npz", "leaf", "image-folder", "huggingface")
TEST_FRACTION = 0.2


class Columns(StrictModel):
    """Names of the columns of a table: dataset npz or huggingface."""

    x: str = Field("x", min_length=1, description="records: images or feature vectors")
    y: str = Field("y", min_length=1, description="labels")
    client: str | None = Field(
        None, min_length=1, description="client that owns the record; null: the column client, if there is one"
    )


class FileSource(StrictModel):
    """The `data.files` section of a configuration."""

    path: str = Field(min_length=1, description="file or folder, absolute or relative to the folder of the data sets")
    columns: Columns = Field(Columns.model_validate({}), description="npz, huggingface: names of the columns")
    shape: Annotated[list[int], Field(min_length=3, max_length=3)] | None = Field(
        None,
        description="images as [channels, height, width]: leaf: shape of a flat record of values from 0 to 1; image-folder, "
        "huggingface: images are converted and resized; null: as in the files",
    )
    classes: int | None = Field(
        None, ge=2, le=256, description="number of classes, which is public; needed if the files do not state it"
    )
    test_fraction: float = Field(
        TEST_FRACTION,
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="fraction of the records, of each client if they have clients, for the test set if the files have none",
    )
