"""Repositories of the evaluation sets on the Hugging Face hub."""

from dataclasses import dataclass

from ..tasks import Task

# DataComp's own conversions, one data set repository a task, named as the folder on disk.
DATACOMP_OWNER = "djghosh"
# Retrieval and WinoGAViL: an annotation table and a zip of images. DataComp reads them through a loading script.
TABLE_OWNER = "nlphuji"
# Subfolder of a data set for files that are still to be converted.
SOURCE_FOLDER = "source"


@dataclass(frozen=True)
class Source:
    """A data set repository on the hub.

    Attributes:
        repository: ``owner/name``.
        converted: whether its files become the local format only through ``eval.download.convert``.
    """

    repository: str
    converted: bool

    def wants(self, path: str) -> bool:
        """Whether a file of the repository is needed (or is its license), given its path there."""
        folder, _, name = path.rpartition("/")
        if folder == "":
            return is_document(name) or name.endswith((".csv", ".zip") if self.converted else (".txt",))
        return not self.converted and folder == "test" and name.endswith((".tar", ".txt"))


def source_of(task: Task) -> Source:
    """The repository that holds a task's data."""
    if task.kind in ("retrieval", "winogavil"):
        return Source(f"{TABLE_OWNER}/{task.key.split('/')[-1]}", converted=True)
    return Source(f"{DATACOMP_OWNER}/{task.folder}", converted=False)


def is_document(name: str) -> bool:
    """Whether a file is a readme or a license."""
    return name.lower().startswith(("readme", "license"))
