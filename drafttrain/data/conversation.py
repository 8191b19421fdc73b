"""Chats and documents, independent of files, chat templates and tokens."""

from dataclasses import dataclass

from drafttrain.data.message import Message


@dataclass
class Conversation:
    """A chat, or a plain document (one message of role "text").

    Attributes:
        id: as in the file; made from file and row where the file has none.
        messages: the turns in order.
        source: "file.json:row 12", for error messages.
        tokenizer: hash of the tokenizer that the token ids belong to, if the file has it.
        tree_of: text of the problem, if the chat comes from a tree of thoughts, whose prompts may reword it.
    """

    id: str
    messages: list[Message]
    source: str
    tokenizer: str | None = None
    tree_of: str | None = None

    @property
    def asked(self) -> list[str]:
        """Return the texts that may hold an evaluation prompt: turns that are no answers, documents, the
        problem of a tree."""
        turns = [message.content for message in self.messages if message.role != "assistant"]
        return turns + ([self.tree_of] if self.tree_of else [])

    @property
    def is_text(self) -> bool:
        """Return whether this is a plain document, in which every token is trained."""
        return len(self.messages) == 1 and self.messages[0].role == "text"
