"""Errors as AWS SDKs read them: a code that programs compare, and words for people."""

from collections.abc import Mapping

from hadelay import errors as ours
from hadelay.errors import HadelayError, shortened

#: Class of an error of hadelay → AWS's code and HTTP status, the same for all AWS services. Any other error with a
#: status of 500 or more is an InternalFailure, which SDKs retry; any other refusal is a ValidationException.
_COMMON: dict[type[HadelayError], tuple[str, int]] = {
    ours.Unauthorized: ("IncompleteSignature", 403),
    ours.Forbidden: ("AccessDeniedException", 403),
    ours.LimitReached: ("ThrottlingException", 400),
    ours.NoLeader: ("ServiceUnavailable", 503),
    ours.Overloaded: ("ServiceUnavailable", 503),
    ours.DiskFull: ("ServiceUnavailable", 503),
    ours.RequestTimeout: ("RequestExpired", 400),
}


class AwsError(HadelayError):
    """A refusal with an error code of AWS. status: HTTP status; 400 for an error of the caller."""

    def __init__(self, code: str, detail: str, status: int = 400) -> None:
        super().__init__(detail)
        self.code = code
        self.http_status = status  # type: ignore[misc]

    @property
    def words(self) -> str:
        return shortened(self.detail)


#: Class of an error of hadelay → code of one AWS service, always with the HTTP status 400.
Codes = Mapping[type[HadelayError], str]


def translated(error: HadelayError, own: Codes) -> AwsError:
    """Translate an error of hadelay to AWS's. own: codes of the service; they take precedence over the codes of all
    services."""
    if isinstance(error, AwsError):
        return error
    code, status = ("InternalFailure", 500) if error.http_status >= 500 else ("ValidationException", 400)
    for kind in type(error).__mro__:
        if kind in own or kind in _COMMON:
            code, status = (own[kind], 400) if kind in own else _COMMON[kind]
            break
    return AwsError(code, error.detail or error.title, status)
