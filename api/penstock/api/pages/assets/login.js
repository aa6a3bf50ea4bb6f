// The code is in the URL's fragment, which browsers do not send. It is removed from the address bar and the history at
// once, and posted. If a user is signed in already, a link must not silently change the user: the button waits.
const form = document.getElementById("login");
const code = location.hash.slice(1);

if (code) {
  history.replaceState(null, "", location.pathname);
  form.elements.code.value = code;
  fetch("/v1/me").then((answer) => {
    if (!answer.ok) form.requestSubmit();
  });
}
