// Menus that save figures and tables. A figure is what is in view of all parts of the page with its name; the tables
// of a page are on the server, which receives the relevant part of the address.
;(() => {
  const menus = ".save-menu"

  function place(menu) {
    const button = document.querySelector(`[popovertarget="${menu.id}"]`).getBoundingClientRect()
    const isBelow = button.bottom + menu.offsetHeight + 8 < innerHeight
    menu.style.right = `${document.documentElement.clientWidth - button.right}px`
    menu.style.top = `${isBelow ? button.bottom + 4 : Math.max(4, button.top - menu.offsetHeight - 4)}px`
  }

  const stepOf = (part) => part.dataset.step ?? document.getElementById("step")?.value

  function fileName(name, part, kind) {
    const {file, page} = document.body.dataset
    const step = stepOf(part)
    return [file, page, name === page ? "" : name, step ? `step-${step}` : ""].filter(Boolean).join("-") + `.${kind}`
  }

  async function save({name, save: kind}) {
    const parts = [...document.querySelectorAll(`[data-figure="${name}"]`)]
    const step = stepOf(parts[0])
    const caption = [document.querySelector(".facts b")?.textContent, document.title.split(" · ")[0], step && `step ${step}`]
    const link = document.createElement("a")
    link.href = URL.createObjectURL(await window.overlapscope.drawing(parts, kind, caption.filter(Boolean).join(" · ")))
    link.download = fileName(name, parts[0], kind)
    link.click()
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000)
  }

  for (const change of ["toggle", "scroll"]) {
    document.addEventListener(change, () => {
      const menu = document.querySelector(`${menus}:popover-open`)
      if (menu) place(menu)
    }, {capture: true})
  }
  document.addEventListener("click", ({target}) => {
    const menu = target.closest?.(menus)
    if (!menu) return
    if (target.matches("a")) target.search = location.search
    if (target.matches("a, button")) menu.hidePopover()
    if (target.dataset.save) save(target.dataset)
  })
})()
